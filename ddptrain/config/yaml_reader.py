"""Reads a YAML file into plain data with the place of each key, and reports what is not valid YAML.

Built on the events of PyYAML's C parser, not on its loader: the loader drops the first value of a key that is given
twice and all positions, and reads YAML 1.1, in which `no` is false, `1e-3` is text and `12:30` is 750.
Aliases, merge keys and tags are refused, so that each value stands where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ddptrain.config.wording import PathKey, dotted, shorten
from ddptrain.errors import ConfigError, Problem

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
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_ALIASES = "write the value out; quote text that starts with * or &"
_HINTS = {
    "mapping values are not allowed": 'quote a value that holds ": ", and check the indentation',
    "could not find expected ':'": 'a key is followed by ": "',
    "cannot start any token": "replace a tab with spaces; quote text that starts with @, ` or %",
    "expected <block end>": "check the indentation",
    "did not find expected key": "check the indentation",
    "did not find expected alphabetic": "quote text that starts with * or &",
    "unexpected end of stream": "a quote is opened and not closed",
    "control characters are not allowed": "delete it",
}


@dataclass(slots=True)
class Document:
    """The data of a file, the place of each key and item as the user is shown it, and the options that change them."""

    source: str
    data: Any
    places: dict[PathKey, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)

    def where(self, path: PathKey) -> str:
        """Return the place of the key at `path`, or of its nearest ancestor that exists."""
        ends = range(len(path), -1, -1)
        return next((self.places[path[:end]] for end in ends if path[:end] in self.places), self.source)

    def order(self, where: str) -> tuple[int, int]:
        """Return the position of a place: the lines of the file come first, then the options."""
        if where in self.options:
            return 1, self.options.index(where)
        line = where.removeprefix(f"{self.source}:")
        return 0, int(line) if line.isdecimal() else 0

    def problem(self, path: PathKey, message: str, hint: str = "") -> Problem:
        """Return a problem of the key at `path`."""
        return Problem(self.where(path), dotted(path), message, hint)


def read_yaml(text: str, where: str, prefix: PathKey = (), *, numbered: bool = True) -> tuple[Document, list[Problem]]:
    """Return the content of the text's only document (None if it is empty), and the problems that did not end it.

    `prefix` is the key that the text is the value of. Without `numbered` the places are `where` alone, not its lines.

    Raises ConfigError if the text is not YAML, is nested too deep, or has an alias or a second document.
    """
    if match := _SURROGATE.search(text):
        raise ConfigError([Problem(where, dotted(prefix), f"the character U+{ord(match[0]):04X} is not allowed")])
    reader = _Reader(text, where, prefix, numbered)
    try:
        return reader.document(), reader.problems
    except yaml.YAMLError as error:
        raise ConfigError([reader.syntax_error(error, text)]) from None


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


def copied(value: Any) -> Any:
    """Return mappings as dicts and tuples as lists, all of them new."""
    if isinstance(value, Mapping):
        return {key: copied(below) for key, below in value.items()}
    return [copied(item) for item in value] if isinstance(value, list | tuple) else value


class _Reader:
    """Builds the data of one document from its events."""

    def __init__(self, text: str, where: str, prefix: PathKey, numbered: bool) -> None:
        self.problems: list[Problem] = []
        self._events: Iterator[Any] = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self._source, self._prefix, self._numbered = where, prefix, numbered
        self._places: dict[PathKey, str] = {}
        self._lines: dict[PathKey, int] = {}

    def document(self) -> Document:
        next(self._events)  # the start of the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return Document(self._source, None)
        data = self._value(next(self._events), self._prefix)
        next(self._events)  # the end of the document
        if not isinstance(after := next(self._events), yaml.StreamEndEvent):
            raise self._fatal(after, (), "a second document starts here", "keep one, and delete the --- line")
        return Document(self._source, data, self._places)

    def _value(self, event: Any, path: PathKey) -> Any:
        self._places.setdefault(path, self._where(event))
        if isinstance(event, yaml.AliasEvent):
            raise self._fatal(event, path, f"aliases are not supported, got *{shorten(str(event.anchor))}", _NO_ALIASES)
        if event.tag is not None and event.tag != "!":
            hint = "delete it; quotes make a value text"
            self._report(event, path, f"the tag {shorten(event.tag)} is not supported", hint)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if len(path) >= MAX_DEPTH:
            raise self._fatal(event, path, f"values are nested more than {MAX_DEPTH} deep", "make it flatter")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*path, len(items))))
        return items

    def _mapping(self, path: PathKey) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, path, items)
            if key is None:
                self._ignored(next(self._events), path)
                continue
            self._places[*path, key], self._lines[*path, key] = self._where(event), event.start_mark.line + 1
            items[key] = self._value(next(self._events), (*path, key))
        return items

    def _key(self, event: Any, path: PathKey, before: Mapping[str, Any]) -> str | None:
        """Return the key, None if it cannot be used: its value is then read, to find more problems, and dropped."""
        is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
        key: Any = self._ignored(event, (*path, 0))
        if is_plain and key == "<<":
            self._report(event, path, "merge keys (<<) are not supported", "write the keys out")
        elif not isinstance(key, str):
            kind = "a list or mapping" if isinstance(key, list | dict) else shorten("null" if key is None else str(key))
            self._report(event, path, f"a key must be text, not {kind}", "write it in quotes")
        elif key in before:
            lines = f"on line {self._lines[*path, key]} and on line {event.start_mark.line + 1}"
            self._report(event, (*path, key), f"is given twice: {lines}", "keep one of them")
        else:
            return key
        return None

    def _ignored(self, event: Any, path: PathKey) -> Any:
        """Return the value; the places in it are not kept."""
        places, self._places = self._places, {}
        value = self._value(event, path)
        self._places = places
        return value

    def _scalar(self, event: Any, path: PathKey) -> Any:
        value = event.value
        if not event.implicit[0] or (path[:1] == ("env",) and value not in _WORDS):  # a number in env stays as written
            return value
        try:
            return scalar(value)
        except ValueError as error:
            self._report(event, path, str(error), "write it in quotes if it is text")
            return 0

    def syntax_error(self, error: yaml.YAMLError, text: str) -> Problem:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        position = getattr(error, "position", None)  # of a character that YAML does not allow
        line = mark.line if mark else text.count("\n", 0, position or 0)
        why = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be read")
        context = str(getattr(error, "context", None) or "").strip()
        message = f"not valid YAML: {why}" + (f" {context}" if context else "")
        hint = next((hint for part, hint in _HINTS.items() if part in message), "")
        where = f"{self._source}:{line + 1}" if self._numbered else self._source
        return Problem(where, dotted(self._prefix), message, hint)

    def _where(self, event: Any) -> str:
        return f"{self._source}:{event.start_mark.line + 1}" if self._numbered else self._source

    def _report(self, event: Any, path: PathKey, message: str, hint: str) -> None:
        self.problems.append(Problem(self._where(event), dotted(path), message, hint))

    def _fatal(self, event: Any, path: PathKey, message: str, hint: str) -> ConfigError:
        return ConfigError([Problem(self._where(event), dotted(path), message, hint)])
