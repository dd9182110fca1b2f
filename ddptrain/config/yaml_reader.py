"""Reads a YAML file into values with their line numbers, and reports any content of the file that is not valid.

Built on YAML's events, not on a YAML loader: a loader recurses, expands aliases for ever, drops a duplicate
key's first value and all positions, and reads YAML 1.1: `no` is false, `1e-3` is text and `12:30` is 750.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from yaml.composer import Composer

from ddptrain.config.wording import PathKey, dotted, shorten
from ddptrain.errors import ConfigError, Problem

MAX_NODES = 100_000
MAX_DEPTH = 50
_LONGEST_NUMBER = 1000

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_WORDS: dict[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_NOT_YAML = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN, _QUOTED = "plain", "quoted"  # the tags of nodes without one in the text
_BAD_ALIASES = ("is not defined above", "holds itself")
_SURROGATE = re.compile("[\ud800-\udfff]")

_HINTS = {
    "mapping values are not allowed": 'quote a value that holds ": ", and check the indentation',
    "could not find expected ':'": 'a key is followed by ": "',
    "cannot start any token": "quote text that starts with @, ` or %",
    "expected <block end>": "check the indentation",
    "did not find expected key": "check the indentation",
    "did not find expected alphabetic": "quote text that starts with * or &",
    "unexpected end of stream": "a quote is opened and not closed",
}


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in the input; `text` shows it to the user. The file comes first (source 0), then each --set."""

    source: int
    line: int
    column: int
    text: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place (in a mapping, that of the key). `size` and `height` include what aliases stand for."""

    place: Place
    value: Any
    size: int = 1
    height: int = 1


def make_nodes(place: Place, value: Any) -> Node:
    """Return plain data as nodes that all have the same place."""
    if isinstance(value, Mapping):
        return Node(place, {key: make_nodes(place, below) for key, below in value.items()})
    return Node(place, [make_nodes(place, item) for item in value] if isinstance(value, list | tuple) else value)


def plain(node: Node) -> Any:
    """Return the value of the node as dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def _stop(where: str, message: str, hint: str = "", key: str = "") -> ConfigError:
    return ConfigError([Problem(where, key, message, hint)])


@dataclass(slots=True)
class Located:
    """A problem and its place, by which the problems of different checks are sorted."""

    place: Place
    problem: Problem


def parse_yaml(
    text: str, place: Callable[[int, int], Place], prefix: PathKey = ()
) -> tuple[Node | None, list[Located]]:
    """Return the root of the text's only document (None if it is empty), and the problems that did not end it.

    `place` makes a place of line and column. `prefix` is the key that the text is the value of.

    Raises ConfigError if the text is not YAML, or has more levels or values than a configuration needs.
    """
    if match := _NOT_YAML.search(text):
        line = text.count("\n", 0, match.start()) + 1
        where = place(line, 1).text
        raise _stop(where, f"the character U+{ord(match[0]):04X} is not allowed", "delete it", dotted(prefix))
    builder = _Builder(text, place, prefix)
    try:
        return builder.root(), builder.problems
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, place, prefix) from None


def _syntax_error(error: yaml.YAMLError, text: str, place: Callable[[int, int], Place], prefix: PathKey) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    reason = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be read")
    lines = text.splitlines()
    start = lines[line - 1] if line <= len(lines) else ""
    indent = start[: len(start) - len(start.lstrip(" \t"))]
    where = place(line, column).text
    if "\t" in indent or start[column - 1 : column] == "\t":
        message, hint = "a tab is used for indentation: YAML allows only spaces", "replace the tab with spaces"
        return _stop(where, message, hint, dotted(prefix))
    context = str(getattr(error, "context", None) or "").strip()
    message = f"not valid YAML: {reason}" + (f" {context}" if context else "")
    hint = next((hint for part, hint in _HINTS.items() if part in message), "")
    return _stop(where, message, hint, dotted(prefix))


def scalar(text: str) -> Any:
    """Return the value of unquoted text by YAML 1.2's core schema. Raises ValueError for a number that is too large."""
    if text in _WORDS:
        return _WORDS[text]
    if infinite := _INFINITE.fullmatch(text):
        return float(f"{infinite[1]}inf")
    whole = _INT.fullmatch(text)
    if not whole and not _FLOAT.fullmatch(text):
        return text
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} characters is too long")
    if whole:
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{shorten(text)} is too large for a number")
    return number


class _Builder(Composer):
    """Builds nodes with PyYAML's composer, from the events of its C parser; limits the depth and the number of values.

    The composer resolves aliases to the same object; one that it can't resolve becomes a node with one of _BAD_ALIASES.
    """

    def __init__(self, text: str, place: Callable[[int, int], Place], prefix: PathKey) -> None:
        super().__init__()
        self.problems: list[Located] = []
        self._events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self._next: Any = None
        self._place_at = place
        self._prefix = prefix
        self._open: list[yaml.Node | None] = []  # the parents of the node that is being composed
        self._composed = 0
        self._built: dict[yaml.Node, Node] = {}

    def root(self) -> Node | None:
        """Return the root of the text's only document, None if the text is empty."""
        self.get_event()  # the start of the stream
        composed = None if self.check_event(yaml.StreamEndEvent) else self.compose_document()
        if not self.check_event(yaml.StreamEndEvent):
            hint = "keep one, and delete the --- line"
            raise self._fatal(self.get_event(), (), "a second document starts here", hint)
        return self._build(composed, self._prefix) if composed is not None else None

    # --- what the composer calls: events, and the tags of nodes that have none ---

    def peek_event(self) -> Any:
        if self._next is None:
            self._next = next(self._events, None)
        return self._next

    def get_event(self) -> Any:
        event, self._next = self.peek_event(), None
        return event

    def check_event(self, *kinds: type[yaml.Event]) -> bool:
        return isinstance(self.peek_event(), kinds)

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _QUOTED

    def descend_resolver(self, parent: yaml.Node | None, index: Any) -> None: ...

    def ascend_resolver(self) -> None: ...

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self._composed += 1
        if self._composed > 2 * MAX_NODES:  # each value of a mapping has a key
            raise self._too_many(event, self._prefix)
        self._open.append(parent)
        if isinstance(event, yaml.AliasEvent):
            node = self.anchors.get(event.anchor)
            if node is None or node in self._open:
                self._open.pop()
                return yaml.ScalarNode(_BAD_ALIASES[node is not None], event.anchor, self.get_event().start_mark)
        elif isinstance(event, yaml.CollectionStartEvent) and len(self._open) + len(self._prefix) > MAX_DEPTH:
            raise self._too_deep(event, self._prefix, "make it flatter")
        else:
            self.anchors.pop(event.anchor, None)  # an anchor may be defined again
        composed = super().compose_node(parent, index)
        self._open.pop()
        return composed

    # --- from composed nodes to ours ---

    def _build(self, node: yaml.Node, path: PathKey) -> Node:
        if node in self._built:
            built = self._built[node]
            if len(path) + built.height > MAX_DEPTH:
                raise self._too_deep(node, path, "use fewer aliases")
            return built
        if node.tag in _BAD_ALIASES:
            raise self._fatal(node, path, f"*{shorten(node.value)} {node.tag}", "quote text that starts with *")
        if node.tag not in (_PLAIN, _QUOTED):
            hint = "delete it; quotes make a value text"
            self._report(node, path, f"the tag {shorten(node.tag)} is not supported", hint)
        self._built[node] = self._scalar(node, path) if isinstance(node, yaml.ScalarNode) else self._items(node, path)
        return self._built[node]

    def _items(self, node: yaml.Node, path: PathKey) -> Node:
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node, path)
            children = list(value.values())
        else:
            value = children = [self._build(item, (*path, number)) for number, item in enumerate(node.value)]
        size = 1 + sum(child.size for child in children)
        if size > MAX_NODES:
            raise self._too_many(node, path)
        return Node(self._place(node), value, size, 1 + max((child.height for child in children), default=0))

    def _mapping(self, node: Any, path: PathKey) -> dict[str, Node]:
        items: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path, items)
            value = self._build(value_node, (*path, key) if key is not None else path)
            if key is not None:
                items[key] = replace(value, place=self._place(key_node))
        return items

    def _key(self, node: yaml.Node, path: PathKey, before: Mapping[str, Node]) -> str | None:
        """Return the key, None if it cannot be used: its value is then read, to find more problems, and dropped."""
        key = self._build(node, path).value
        if node.tag == _PLAIN and node.value == "<<":
            self._report(node, path, "merge keys (<<) are not supported", "write the keys out")
        elif not isinstance(key, str):
            kind = "a list or mapping" if isinstance(key, list | dict) else shorten("null" if key is None else str(key))
            self._report(node, path, f"a key must be text, not {kind}", "write it in quotes")
        elif key in before:
            lines = f"on line {before[key].place.line} and on line {self._place(node).line}"
            self._report(node, (*path, key), f"is given twice: {lines}", "keep one of them")
        else:
            return key
        return None

    def _scalar(self, node: yaml.Node, path: PathKey) -> Node:
        value = node.value
        if _SURROGATE.search(value):
            self._report(node, path, "holds half of a surrogate pair, which is not a character", "write the character")
            value = ""
        elif node.tag == _PLAIN and (path[:1] != ("env",) or value in _WORDS):  # a number in env stays as written
            try:
                value = scalar(value)
            except ValueError as error:
                self._report(node, path, str(error), "write it in quotes if it is text")
                value = 0
        return Node(self._place(node), value)

    # --- problems ---

    def _place(self, item: Any) -> Place:
        mark = item.start_mark
        return self._place_at(mark.line + 1, mark.column + 1) if mark else self._place_at(1, 1)

    def _report(self, item: Any, path: PathKey, message: str, hint: str) -> None:
        place = self._place(item)
        self.problems.append(Located(place, Problem(place.text, dotted(path), message, hint)))

    def _fatal(self, item: Any, path: PathKey, message: str, hint: str) -> ConfigError:
        return _stop(self._place(item).text, message, hint, dotted(path))

    def _too_deep(self, item: Any, path: PathKey, hint: str) -> ConfigError:
        return self._fatal(item, path, f"values are nested more than {MAX_DEPTH} deep", hint)

    def _too_many(self, item: Any, path: PathKey) -> ConfigError:
        message = f"there are more than {MAX_NODES:,} values, aliases counted in full"
        return self._fatal(item, path, message, "use fewer")
