"""Reads a YAML file into values that know their line, and survives whatever the file may hold.

Built on YAML's events, not on a YAML loader: a loader recurses, expands aliases for ever, drops a duplicate
key's first value and all positions, and reads YAML 1.1: `no` is false, `1e-3` is text and `12:30` is 750.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ddptrain.config.wording import PathKey, dotted, shown
from ddptrain.errors import ConfigError, Problem

MAX_BYTES = 1 << 20
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
    """Where something stands: ordered as the user reads, the file first and then each --set."""

    source: int
    line: int
    column: int
    text: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place (its key's, in a mapping). `size` and `height` count aliases in full."""

    place: Place
    value: Any
    size: int = 1
    height: int = 1


def plain(node: Node) -> Any:
    """The value of the node as bare dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def plain_yaml(data: bytes, name: str) -> Any:
    """What the text of somebody's YAML file holds, as bare dicts, lists and scalars; None where it is empty.

    Never more than `MAX_BYTES` of text, `MAX_DEPTH` levels and `MAX_NODES` values, aliases counted in full. Raises:
    ConfigError where there is more, or where it can't be read.
    """
    where = shown(name, 300)
    if len(data) > MAX_BYTES:
        raise _too_large(where, len(data))
    document = parse_yaml(_decode(data, where), lambda line, column: Place(0, line, column, f"{where}:{line}"))
    if document.problems:
        raise ConfigError([located.problem for located in document.problems[:1]])
    return plain(document.root) if document.root is not None else None


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark. Line ends stay as they are.

    Raises: ConfigError where it can't be read, isn't a regular file, isn't UTF-8, or is over 1 MiB.
    """
    where = shown(str(path), 300)
    try:
        # Looked at before it is opened: opening a FIFO waits for a writer, and a device may act on it.
        _refuse_by_kind(os.stat(path), where)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            _refuse_by_kind(os.fstat(descriptor), where)
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _stop(where, f"can't be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise _too_large(where, len(data))
    return _decode(data, where)


def _refuse_by_kind(status: os.stat_result, where: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise _stop(where, "is a folder, not a YAML file", "name the file in it")
    if not stat.S_ISREG(status.st_mode):
        raise _stop(where, "is not a regular file", "write the configuration into a file first")
    if status.st_size > MAX_BYTES:
        raise _too_large(where, status.st_size)


def _too_large(where: str, size: int) -> ConfigError:
    message = f"has {size:,} bytes, which is too large for a configuration: at most {MAX_BYTES:,} are read"
    return _stop(where, message, "is it the right file?")


def _decode(data: bytes, where: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _stop(f"{where}:1", "is UTF-16", "save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec counts from behind the byte order mark.
        start = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, start) + 1
        raise _stop(f"{where}:{line}", f"byte 0x{data[start]:02x} is not UTF-8", "save it as UTF-8") from None


def _stop(where: str, message: str, hint: str = "", key: str = "") -> ConfigError:
    return ConfigError([Problem(where, key, message, hint)])


@dataclass(slots=True)
class Located:
    """A problem and its place, so that problems found by different checks can be put in order."""

    place: Place
    problem: Problem


@dataclass(slots=True)
class Document:
    """What one YAML text holds: its root, None where it is empty, and problems that did not end it."""

    root: Node | None
    problems: list[Located]


def parse_yaml(text: str, place: Callable[[int, int], Place], prefix: PathKey = ()) -> Document:
    """The one document of the text; `place` makes a place of line and column, `prefix` is the key it is for.

    Raises: ConfigError where the text is no YAML, or nests or grows beyond what a configuration needs.
    """
    found = _NOT_YAML.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        where = place(line, 1).text
        raise _stop(where, f"the character U+{ord(found[0]):04X} is not allowed", "delete it", dotted(prefix))
    builder = _Builder(place, prefix)
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            builder.take(event)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, place, prefix) from None
    return Document(builder.root, builder.problems)


def _syntax_error(error: yaml.YAMLError, text: str, place: Callable[[int, int], Place], prefix: PathKey) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    reason = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be read")
    lines = text.splitlines()
    start = lines[line - 1] if line <= len(lines) else ""
    indent = start[: len(start) - len(start.lstrip(" \t"))]
    where = place(line, column).text
    if "\t" in indent or start[column - 1 : column] == "\t":
        return _stop(where, "a tab stands where YAML takes only spaces", "indent with spaces", dotted(prefix))
    context = str(getattr(error, "context", None) or "").strip()
    message = f"not valid YAML: {reason}" + (f" {context}" if context else "")
    hint = next((hint for part, hint in _HINTS.items() if part in message), "")
    return _stop(where, message, hint, dotted(prefix))


def scalar(text: str) -> Any:
    """What unquoted text stands for, by the core schema of YAML 1.2: only true and false are booleans.

    Raises: ValueError for a number that is too long or too large.
    """
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
        raise ValueError(f"{shown(text)} is too large for a number")
    return number


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not come yet."""

    place: Place
    value: Any
    anchor: str | None
    size: int = 1
    height: int = 1
    key: str | None = None
    key_place: Place | None = None
    # A key that can't be used: its value is read, to find more problems, and dropped.
    skipping: bool = False

    @property
    def wants_key(self) -> bool:
        return isinstance(self.value, dict) and self.key is None and not self.skipping


class _Builder:
    """Takes YAML events and builds nodes, with a stack of its own in place of recursion."""

    def __init__(self, place: Callable[[int, int], Place], prefix: PathKey) -> None:
        self.root: Node | None = None
        self.problems: list[Located] = []
        self._place = place
        self._prefix = prefix
        self._open: list[_Open] = []
        self._anchors: dict[str, Node] = {}
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        """One event, in the order of the text."""
        mark = event.start_mark
        place = self._place(mark.line + 1, mark.column + 1) if mark else self._place(1, 1)
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise self._fatal(place, "a second document starts here", "keep one, and delete the --- line")
        elif isinstance(event, yaml.AliasEvent):
            self._add(self._aliased(event.anchor or "", place), place)
        elif isinstance(event, yaml.ScalarEvent):
            node = Node(place, self._scalar(event, place))
            self._remember(event.anchor, node)
            self._add(node, place, merge=event.value == "<<" and event.implicit[0])
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._begin(event, place)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = self._open.pop()
            node = Node(done.place, done.value, done.size, done.height)
            self._remember(done.anchor, node)
            self._add(node, done.place)

    def _path(self) -> Iterator[str | int]:
        yield from self._prefix
        for frame in self._open:
            if isinstance(frame.value, list):
                yield len(frame.value)
            elif frame.key is not None:
                yield frame.key

    def _begin(self, event: yaml.CollectionStartEvent, place: Place) -> None:
        if len(self._open) + len(self._prefix) >= MAX_DEPTH:
            raise self._fatal(place, f"values are nested more than {MAX_DEPTH} deep", "make it flatter")
        self._refuse_tag(event.tag, place)
        if event.anchor:
            self._anchors.pop(event.anchor, None)
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._open.append(_Open(place, value, event.anchor))

    def _scalar(self, event: yaml.ScalarEvent, place: Place) -> Any:
        self._refuse_tag(event.tag, place)
        if _SURROGATE.search(event.value):
            self._report(place, "holds half of a surrogate pair, which is no character", "write the character")
            return ""
        if not event.implicit[0]:
            return event.value
        try:
            return scalar(event.value)
        except ValueError as error:
            self._report(place, str(error), "write it in quotes if it is text")
            return 0

    def _refuse_tag(self, tag: str | None, place: Place) -> None:
        if tag is not None:
            self._report(place, f"the tag {shown(tag)} is not supported", "delete it; quotes make a value text")

    def _aliased(self, anchor: str, place: Place) -> Node:
        if anchor not in self._anchors:
            own = any(frame.anchor == anchor for frame in self._open)
            message = "holds itself" if own else "is not defined above"
            raise self._fatal(place, f"*{shown(anchor)} {message}", "quote text that starts with *")
        node = self._anchors[anchor]
        if len(self._open) + len(self._prefix) + node.height > MAX_DEPTH:
            raise self._fatal(place, f"values are nested more than {MAX_DEPTH} deep", "use fewer aliases")
        return node

    def _remember(self, anchor: str | None, node: Node) -> None:
        if anchor:
            self._anchors[anchor] = node

    def _add(self, node: Node, place: Place, merge: bool = False) -> None:
        """Puts a finished node where it belongs: as a key, a mapping's value, a list's item, or the root."""
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        if parent.wants_key:
            self._take_key(parent, node, place, merge)
            return
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if parent.size > MAX_NODES:
            raise self._fatal(place, f"there are more than {MAX_NODES:,} values, aliases counted in full", "use fewer")
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif parent.key is not None:
            parent.value[parent.key] = replace(node, place=parent.key_place or place)
        parent.key, parent.skipping = None, False

    def _take_key(self, parent: _Open, node: Node, place: Place, merge: bool) -> None:
        key = node.value
        parent.skipping = True
        if merge:
            self._report(place, "merge keys (<<) are not supported", "write the keys out")
        elif not isinstance(key, str):
            kind = "a list or mapping" if isinstance(key, list | dict) else shown("null" if key is None else str(key))
            self._report(place, f"a key must be text, not {kind}", "write it in quotes")
        elif key in parent.value:
            first = parent.value[key].place
            parent.key = key
            twice = f"is given twice: on line {first.line} and on line {place.line}"
            self._report(place, twice, "keep one of them")
            parent.key = None
        else:
            parent.key, parent.key_place, parent.skipping = key, place, False

    def _report(self, place: Place, message: str, hint: str) -> None:
        self.problems.append(Located(place, Problem(place.text, dotted(tuple(self._path())), message, hint)))

    def _fatal(self, place: Place, message: str, hint: str) -> ConfigError:
        return _stop(place.text, message, hint, dotted(tuple(self._path())))
