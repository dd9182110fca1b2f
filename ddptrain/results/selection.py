"""Selects, sorts and tabulates runs by their fields, with conditions such as `val/loss < 2.3 and params.layers == 1`.

A condition has Python's syntax, of which only comparisons, `and`, `or`, `not`, lists and fields are accepted; nothing
else is executed. A field is a name, `last(name)` or `best(name)`. A number may have a unit of time: `2h` is 7200. A
comparison with a field that the run does not have is false. Text needs no quotes where it is compared with status,
name, run or workload: `status == failed`.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddptrain.config.rank_settings import goal_of
from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.results.errors import ResultsError
from ddptrain.results.metrics import AllSeries, is_number, read_series
from ddptrain.results.recorded_config import params_of
from ddptrain.results.run import Run, parse_time, time_text
from ddptrain.text_tables import clean_line, duration

PARAMS = "params."
_LONGEST_CELL = 60


# --- Fields: the values of runs by name ---


def _age_s(view: Run) -> float | None:
    started = parse_time(view.record.started_at)
    return None if started is None else (datetime.now(UTC) - started).total_seconds()


FIELDS: Mapping[str, Callable[[Run], Any]] = {
    "run": lambda view: view.run_id,
    "name": lambda view: view.record.name,
    "workload": lambda view: view.record.workload,
    "status": lambda view: str(view.shown_status),
    "started": lambda view: view.record.started_at or None,
    "ended": lambda view: view.record.ended_at,
    "duration": lambda view: view.duration_s,
    "age": _age_s,
    "ranks": lambda view: view.record.world_size or None,
    "attempts": lambda view: len(view.record.attempts),
    "exit_code": lambda view: view.record.exit_code,
    "failure": lambda view: view.record.failure.summary if view.record.failure is not None else None,
    "jobs": lambda view: [job.id for job in view.record.jobs if job.id],
    "commit": lambda view: view.record.git.commit if view.record.git is not None else None,
    "tags": lambda view: list(view.annotations.tags),
    "note": lambda view: view.annotations.note or None,
}
_SHOWN: Mapping[str, Callable[[Any], str]] = {  # in a table; other values as value_text() writes them
    **dict.fromkeys(("duration", "age"), duration),
    **dict.fromkeys(("started", "ended"), lambda value: time_text(value) or "-"),
}


class RunFields:
    """Looks up the values of one run; files besides run.json are read when they are needed, once."""

    def __init__(self, view: Run) -> None:
        self.view = view
        self._known: dict[str, Any] = {}

    def __call__(self, field: str) -> Any:
        """Return the value of a field, a parameter, a metric, last(METRIC) or best(METRIC); None if there is none."""
        if field not in self._known:
            self._known[field] = self._find(field)
        return self._known[field]

    def _find(self, field: str) -> Any:
        if field in FIELDS:
            return FIELDS[field](self.view)
        if field.startswith("best("):
            return best_value(self.view, field[5:-1])
        if field.startswith(PARAMS):
            return _below(params_of(self.view), field.removeprefix(PARAMS))
        return self.view.record.numbers.get(field[5:-1] if field.startswith("last(") else field)


def _below(values: Any, path: str) -> Any:
    """Return the value at a path such as optimizer.lr; a key may contain dots itself."""
    if not isinstance(values, dict):
        return None
    if path in values:
        return values[path]
    key, _, rest = path.partition(".")
    return _below(values.get(key), rest) if rest else None


def best_value(view: Run, metric: str, series: AllSeries | None = None, goal: str = "") -> float | None:
    """Return the best value of a metric: of the run's best checkpoint, or else of metrics.jsonl, mean over the ranks.

    None if the run does not have it, or if it is not known whether it should be small or large. `series` are the
    metrics of the run, if the caller has read them; `goal` is min or max, if the caller knows it.
    """
    best = view.record.best
    if best is not None and best.metric == metric:
        return best.value if math.isfinite(best.value) else None
    goal = goal or goal_of(metric)
    if not goal:
        return None
    try:
        series = read_series(view.metrics_jsonl) if series is None else series
    except ResultsError:
        return None
    by_step: dict[float | str, list[float]] = {}
    for (name, _), rank_series in series.items():
        if name == metric:
            for number, (step, value) in enumerate(zip(rank_series.step, rank_series.value, strict=True)):
                by_step.setdefault(f"call {number}" if step is None else step, []).append(value)
    means = filter(math.isfinite, (sum(values) / len(values) for values in by_step.values()))
    return min(means, default=None) if goal == "min" else max(means, default=None)


# --- Conditions ---

Lookup = Callable[[str], Any]  # the value of a field; None if the run does not have it
_Node = Callable[[Lookup], Any]

_LONGEST = 1_000  # characters; so it is also not nested too deeply
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_WORDS = {"and": "and", "or": "or", "not": "not", "in": "in", "true": "True", "false": "False"}
_TOKEN = re.compile(
    r"(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<call>best|last)(?=\s*\()"
    r"|(?P<name>[^\W\d][\w./:@-]*)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<unit>[smhd]?)(?![\w./:-])"
)
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TEXT_FIELDS = frozenset({"status", "name", "run", "workload"})
_HINT = "compare with ==, < and so on, connect with and, or, not, and write text in quotes"


@dataclass(frozen=True, slots=True)
class Expression:
    """A condition on runs; `fields` are those that it names."""

    fields: tuple[str, ...]
    _node: _Node

    def matches(self, lookup: Lookup) -> bool:
        """Return whether the condition is true for a run."""
        return _is_true(self._node(lookup))


def parse_expression(text: str) -> Expression:
    """Parse a condition. Raises UsageError."""
    parser = _Parser(text)
    node = parser.node(parser.tree)
    return Expression(tuple(dict.fromkeys(parser.fields)), node)


def parse_fields(text: str) -> list[str]:
    """Parse fields that are separated by commas, as `val/loss, best(val/loss), params.layers`. Raises UsageError."""
    parser = _Parser(f"[{text}]")
    parser.node(parser.tree)
    if not parser.fields or any(not isinstance(item, ast.Name | ast.Call) for item in getattr(parser.tree, "elts", ())):
        raise parser.error("expected fields, as val/loss,best(val/loss)")
    return parser.fields


class _Parser:
    """Turns the names of a text, as val/loss, into names of Python, and builds functions from Python's syntax tree."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._names: list[str] = []
        self.fields: list[str] = []
        if len(text) > _LONGEST:
            raise UsageError(f"the expression has {len(text):,} characters; at most {_LONGEST:,} are allowed")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's, on code that is only strange
                self.tree = ast.parse(_TOKEN.sub(self._token, text.replace("\n", " ")).strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.error(str(getattr(error, "msg", error))) from None

    def error(self, what: str) -> UsageError:
        return UsageError(f'cannot read "{shorten(self._text, 200)}": {what}; {_HINT}')

    def _token(self, match: re.Match[str]) -> str:
        if match["text"]:
            return repr(match["text"][1:-1])
        if match["number"]:
            return str(float(match["number"]) * _UNITS_S[match["unit"]]) if match["unit"] else match[0]
        if match["call"] or match[0] in _WORDS:
            return _WORDS.get(match[0], match[0])
        self._names.append(match[0])
        return f"_{len(self._names) - 1}"

    def _name(self, tree: ast.expr) -> str:
        """Return the name that stands for a field or a text; "" for another expression."""
        if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
            return tree.value
        return self._names[int(tree.id[1:])] if isinstance(tree, ast.Name) and tree.id.startswith("_") else ""

    def node(self, tree: ast.expr, *, is_text: bool = False) -> _Node:
        """Return a function for an operand or a condition; is_text: names are texts without quotes."""
        match tree:
            case ast.Constant(value=str() | int() | float() as value):
                return lambda look: value
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
                number = -value if isinstance(sign, ast.USub) else value
                return lambda look: number
            case ast.List(elts=items) | ast.Tuple(elts=items):
                made = [self.node(item, is_text=is_text) for item in items]
                return lambda look: [item(look) for item in made]
            case ast.BoolOp(op=op, values=values):
                parts, fold = [self.node(each) for each in values], all if isinstance(op, ast.And) else any
                return lambda look: fold(_is_true(part(look)) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                negated = self.node(inner)
                return lambda look: not _is_true(negated(look))
            case ast.Compare(left=left, ops=ops, comparators=others):
                with_text = isinstance(left, ast.Name) and self._name(left) in _TEXT_FIELDS
                sides = [self.node(left), *(self.node(side, is_text=with_text) for side in others)]
                # As in Python, 1 < x < 2 is 1 < x and x < 2.
                return lambda look: all(_holds(op, sides[at](look), sides[at + 1](look)) for at, op in enumerate(ops))
            case ast.Name() if is_text and self._name(tree) not in _TEXT_FIELDS:
                text = self._name(tree)
                return lambda look: text
            case ast.Name() if self._name(tree):
                field = self._name(tree)
            case ast.Call(func=ast.Name(id="best" | "last" as kind), args=[of], keywords=[]) if self._name(of):
                field = f"{kind}({self._name(of)})"
            case _:
                raise self.error("there is something other than comparisons")
        self.fields.append(field)
        return lambda look: look(field)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_true(value: Any) -> bool:
    return bool(value) and not _is_missing(value)


def _holds(sign: ast.cmpop, left: Any, right: Any) -> bool:
    """Compare two values; with a missing value, or by order with one of another type, this is false."""
    if _is_missing(left) or _is_missing(right):
        return False
    if isinstance(sign, ast.In | ast.NotIn):
        if isinstance(right, str):
            return (isinstance(left, str) and left in right) == isinstance(sign, ast.In)
        found = isinstance(right, list | tuple) and any(_typed(item) == _typed(left) for item in right)
        return found == isinstance(sign, ast.In)
    if isinstance(sign, ast.Eq | ast.NotEq):
        return bool(_typed(left) == _typed(right)) == isinstance(sign, ast.Eq)
    comparable = (is_number(left) and is_number(right)) or (isinstance(left, str) and isinstance(right, str))
    return comparable and type(sign) in _ORDER and _ORDER[type(sign)](left, right)


def _typed(value: Any) -> Any:
    """Return a value to compare with ==: Python's true is 1, and a tuple is no list."""
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return isinstance(value, bool), value


# --- Selection and table ---


@dataclass(frozen=True, slots=True)
class Selection:
    """Which runs to list, in which order, with which columns.

    sort: fields, and whether from large to small; runs without a value are last in both directions. columns: None for
    the usual table.
    """

    where: Expression | None = None
    sort: Sequence[tuple[str, bool]] = ()
    columns: Sequence[str] | None = None

    @classmethod
    def parse(cls, where: str | None, sort: str | None, columns: str | None) -> Selection:
        """Parse the options of the command line. Raises UsageError, which names the option."""
        return cls(
            _named("--where", where, parse_expression),
            _named("--sort", sort, _sort_keys) or (),
            _named("--columns", columns, parse_fields),
        )

    @property
    def fields(self) -> list[str]:
        """All fields that are used, each once."""
        used = (*(self.where.fields if self.where else ()), *(field for field, _ in self.sort), *(self.columns or ()))
        return list(dict.fromkeys(used))

    @property
    def extra_columns(self) -> list[str]:
        """The fields to add to the usual table: parameters and metrics that decide what is listed, and where."""
        return [field for field in self.fields if field not in FIELDS]

    @property
    def needs_metrics(self) -> bool:
        """Whether metrics.jsonl of the runs is read."""
        return any(field.startswith("best(") for field in self.fields)

    def apply(self, views: Iterable[Run]) -> list[RunFields]:
        """Return the runs that match, sorted."""
        runs = [RunFields(view) for view in views]
        matching = [run for run in runs if self.where is None or self.where.matches(run)]
        for field, descending in reversed(self.sort):  # sorting is stable: the first key is the last to be applied
            known = [run for run in matching if not _is_missing(run(field))]
            missing = [run for run in matching if _is_missing(run(field))]
            matching = sorted(known, key=lambda run: _sorted_as(run(field)), reverse=descending) + missing
        return matching

    def unknown_fields(self, views: Sequence[Run]) -> list[str]:
        """Return a message for each field that no run has: it may be misspelled, or text without quotes."""
        runs = [RunFields(view) for view in views]
        unknown = [field for field in self.extra_columns if all(run(field) is None for run in runs)] if runs else []
        if not unknown:
            return []
        metrics = {name for view in views for name in view.record.last_metrics}
        params = {PARAMS + str(name) for view in views for name in params_of(view)}
        known = sorted({*FIELDS, *metrics, *params})
        messages = []
        for field in unknown:
            is_call = field.endswith(")")
            hint = did_you_mean(field[5:-1] if is_call else field, known) if len(known) <= 30 else ""
            text = "" if is_call else f'; text is written in quotes, as "{shorten(field, 40)}"'
            messages.append(f"no run has {shorten(field)}{f': {hint}' if hint else ''}{text}")
        return messages


def _named(option: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    try:
        return None if text is None else parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _sort_keys(text: str) -> list[tuple[str, bool]]:
    """Parse `val/loss` or `-started,name`; a minus sorts from large to small."""
    parts = [part.strip() for part in text.split(",")]
    return [(parse_fields(part.removeprefix("-"))[0], part.startswith("-")) for part in parts]


def _sorted_as(value: Any) -> tuple[int, Any]:
    """Return a sort key for values of any type: numbers are before texts."""
    if isinstance(value, int | float):  # also true and false
        return 0, value
    return 1, value if isinstance(value, str) else json.dumps(value, default=str)


def header(fields: Sequence[str]) -> list[str]:
    """Return the titles of columns: fields in capitals; names of metrics and parameters as they are."""
    return [field.upper() if field in FIELDS else field for field in fields]


def cells(run: RunFields, fields: Sequence[str]) -> list[str]:
    """Return the values of a run as text, "-" for none."""
    return [clean_line(_SHOWN.get(field, value_text)(run(field))) for field in fields]


def value_text(value: Any, longest: int = _LONGEST_CELL) -> str:
    """Return a value in few characters: numbers with five significant digits, lists as in JSON."""
    if value is None or value == [] or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return shorten(" ".join(value), longest)
    return shorten(value.replace("\n", " ") if isinstance(value, str) else json.dumps(value, default=str), longest)
