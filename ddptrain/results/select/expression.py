"""Parses conditions on runs, such as `val/loss < 2.3 and params.layers == 1`. Nothing is executed but comparisons.

    condition  = and-part {"or" and-part}
    and-part   = not-part {"and" not-part}
    not-part   = "not" not-part | comparison
    comparison = operand {("<" | "<=" | ">" | ">=" | "==" | "!=" | ["not"] "in") operand}
    operand    = "(" condition ")" | "[" operands "]" | number | text | true | false | field
    field      = name | "last" "(" name ")" | "best" "(" name ")"

A number may have a unit of time: `2h` is 7200. A comparison with a field that the run does not have is false.
Text needs no quotes where it is compared with status, name, run or workload: `status == failed`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.results.metrics import is_number


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a run: `kind` is "" (a field, a parameter, or the last value of a metric), "last" or "best"."""

    name: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.kind}({self.name})" if self.kind else self.name


Lookup = Callable[[Field], Any]  # the value of a field; None if the run does not have it
_Node = Callable[[Lookup], Any]

_LONGEST = 4_000  # characters
_DEEPEST = 50
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_TOKEN = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?P<unit>[smhd]?)(?![\w./:-]))"
    r"|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<name>[^\W\d][\w./:@-]*)"
    r"|(?P<sign><=|>=|==|!=|[<>()\[\],])"
)
_HINTS = {"=": 'write "==" to compare', "&": 'write "and"', "|": 'write "or"', "!": 'write "not" or "!="'}
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TEXT_FIELDS = frozenset({"status", "name", "run", "workload"})
_WORDS = frozenset({"and", "or", "not", "in", "true", "false"})


class _Token(NamedTuple):
    kind: str  # number, text, name, sign, word or end
    text: str
    at: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Expression:
    """A condition on runs; `fields` are those that it names."""

    text: str
    fields: tuple[Field, ...]
    _node: _Node

    def matches(self, lookup: Lookup) -> bool:
        """Return whether the condition is true for a run."""
        return _is_true(self._node(lookup))


def parse_expression(text: str) -> Expression:
    """Parse a condition. Raises UsageError, with the position of what is wrong."""
    parser = _Parser(text)
    node = parser.whole(parser.condition)
    return Expression(text, tuple(dict.fromkeys(parser.fields)), node)


def parse_fields(text: str) -> list[Field]:
    """Parse fields that are separated by commas, as `val/loss, best(val/loss), params.layers`. Raises UsageError."""
    parser = _Parser(text)
    parser.whole(parser.field_list)
    return parser.fields


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.fields: list[Field] = []
        self._depth = 0
        self._is_word_text = False
        if len(text) > _LONGEST:
            raise UsageError(f"the expression has {len(text):,} characters; at most {_LONGEST:,} are allowed")
        self._tokens = list(self._scan())
        self._next = 0

    def whole(self, rule: Callable[[], Any]) -> Any:
        """Apply the rule; it must use all of the text."""
        result = rule()
        if self._token.kind != "end":
            raise self._unexpected('expected "and", "or" or the end')
        return result

    def condition(self) -> _Node:
        nodes = [self._all_of()]
        while self._take("or"):
            nodes.append(self._all_of())
        return nodes[0] if len(nodes) == 1 else lambda look: any(_is_true(node(look)) for node in nodes)

    def field_list(self) -> None:
        while True:
            if self._token.kind != "name":
                raise self._unexpected("expected a field, as val/loss")
            self._field()
            if not self._take(","):
                return

    def _all_of(self) -> _Node:
        nodes = [self._negation()]
        while self._take("and"):
            nodes.append(self._negation())
        return nodes[0] if len(nodes) == 1 else lambda look: all(_is_true(node(look)) for node in nodes)

    def _negation(self) -> _Node:
        if self._take("not"):
            self._deeper()
            node = self._negation()
            self._depth -= 1
            return lambda look: not _is_true(node(look))
        return self._comparison()

    def _comparison(self) -> _Node:
        is_text = self._token.kind == "name" and self._token.text in _TEXT_FIELDS
        first = self._operand()
        rest: list[tuple[str, _Node]] = []
        while sign := self._comparison_sign():
            self._is_word_text = is_text
            rest.append((sign, self._operand(after=sign)))
            self._is_word_text = False
        if not rest:
            return first

        def compare(look: Lookup) -> bool:
            left = first(look)
            for sign, node in rest:  # as in Python, 1 < x < 2 is 1 < x and x < 2
                right = node(look)
                if not _holds(sign, left, right):
                    return False
                left = right
            return True

        return compare

    def _comparison_sign(self) -> str:
        for sign in ("==", "!=", *_ORDER, "in"):
            if self._take(sign):
                return sign
        if self._token.text == "not" and self._tokens[self._next + 1].text == "in":
            self._next += 2
            return "not in"
        return ""

    def _operand(self, after: str = "") -> _Node:
        token = self._token
        if token.kind in ("number", "text") or (token.kind == "word" and token.text in ("true", "false")):
            self._next += 1
            return lambda look: token.value
        if token.kind == "name" and self._is_word_text and token.text not in _TEXT_FIELDS:
            self._next += 1
            return lambda look: token.text
        if token.kind == "name":
            field = self._field()
            return lambda look: look(field)
        for opening, rule, closing in (("(", self.condition, ")"), ("[", self._items, "]")):
            if self._take(opening):
                self._deeper()
                node = rule()
                self._close(closing, token.at)
                self._depth -= 1
                return node
        raise self._unexpected("expected a value" + (f' after "{after}"' if after else ""))

    def _items(self) -> _Node:
        nodes: list[_Node] = []
        while self._token.text != "]":
            nodes.append(self._operand())
            if not self._take(","):
                break
        return lambda look: [node(look) for node in nodes]

    def _field(self) -> Field:
        token = self._token
        self._next += 1
        if token.text in ("best", "last") and self._take("("):
            named = self._token
            if named.kind not in ("name", "text"):
                raise self._unexpected(f"expected the name of a metric, as {token.text}(val/loss)")
            self._next += 1
            self._close(")", token.at)
            field = Field(named.value if named.kind == "text" else named.text, token.text)
        else:
            field = Field(token.text)
        self.fields.append(field)
        return field

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, text: str) -> bool:
        token = self._token
        if token.kind in ("sign", "word") and token.text == text:
            self._next += 1
            return True
        return False

    def _close(self, sign: str, opened_at: int) -> None:
        if not self._take(sign):
            raise self._unexpected(f'expected "{sign}", which closes what begins at character {opened_at + 1}')

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._unexpected(f"more than {_DEEPEST} levels of nesting")

    def _scan(self) -> Iterator[_Token]:
        at = 0
        while at < len(self._text):
            if self._text[at].isspace():
                at += 1
                continue
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise self._bad_character(at)
            yield _token(match)
            at = match.end()
        yield _Token("end", "", len(self._text))

    def _bad_character(self, at: int) -> UsageError:
        char = self._text[at]
        if char in "'\"":
            return self._error(at, f"the text that begins with {char} has no end")
        number = re.match(r"[\w.+:-]+", self._text[at:])
        what = (
            f'"{shorten(number[0], 40)}" is neither a number nor a name' if number else f'unexpected "{shorten(char)}"'
        )
        hint = _HINTS.get(char, "write names of that kind as last('...'), and text in quotes")
        return self._error(at, f"{what}; {hint}")

    def _unexpected(self, what: str) -> UsageError:
        token = self._token
        found = "the end" if token.kind == "end" else f'"{shorten(token.text, 40)}"'
        return self._error(token.at, f"{what}, found {found}")

    def _error(self, at: int, what: str) -> UsageError:
        return UsageError(f'cannot read "{shorten(self._text, 200)}": at character {at + 1}: {what}')


def _token(match: re.Match[str]) -> _Token:
    kind, text = str(match.lastgroup), match[0]
    if match["number"]:
        unit = match["unit"]
        return _Token("number", text, match.start(), float(text.removesuffix(unit)) * _UNITS_S.get(unit, 1.0))
    if kind == "text":
        return _Token(kind, text, match.start(), text[1:-1])
    if text in _WORDS:
        return _Token("word", text, match.start(), text == "true")
    return _Token(kind, text, match.start())


def _is_true(value: Any) -> bool:
    return bool(value) and not _is_missing(value)


def _holds(sign: str, left: Any, right: Any) -> bool:
    """Compare two values; with a missing value, or by order with one of another type, this is false."""
    if _is_missing(left) or _is_missing(right):
        return False
    if sign in ("in", "not in"):
        return _contains(right, left) == (sign == "in")
    if sign in ("==", "!="):
        return _equal(left, right) == (sign == "==")
    comparable = (is_number(left) and is_number(right)) or (isinstance(left, str) and isinstance(right, str))
    return comparable and _ORDER[sign](left, right)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, bool) is not isinstance(right, bool):
        return False  # Python's true is 1
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, str):
        return isinstance(part, str) and part in whole
    return isinstance(whole, list | tuple) and any(_equal(item, part) for item in whole)
