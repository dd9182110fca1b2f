"""Selects runs by a condition, sorts them, and makes a table of chosen columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.select.expression import Expression, Field, parse_expression, parse_fields
from ddptrain.results.select.fields import FIELDS, PARAMS, RunFields
from ddptrain.results.select.recorded_config import params_of
from ddptrain.text_tables import clean_line, duration

_LONGEST_CELL = 60
_SECONDS = ("duration", "age")
_TIMES = ("started", "ended")


@dataclass(frozen=True, slots=True)
class SortKey:
    """A field to sort by; runs without a value are last in both directions."""

    field: Field
    descending: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """Which runs to list, in which order, with which columns; columns is None for the usual table."""

    where: Expression | None = None
    sort: Sequence[SortKey] = ()
    columns: Sequence[Field] | None = None

    @classmethod
    def parse(cls, where: str | None, sort: str | None, columns: str | None) -> Selection:
        """Parse the options of the command line. Raises UsageError, which names the option."""
        return cls(
            _named("--where", lambda: parse_expression(where)) if where is not None else None,
            _named("--sort", lambda: _sort_keys(sort)) if sort is not None else (),
            _named("--columns", lambda: parse_fields(columns)) if columns is not None else None,
        )

    @property
    def fields(self) -> list[Field]:
        """All fields that are used, each once."""
        used = (*(self.where.fields if self.where else ()), *(key.field for key in self.sort), *(self.columns or ()))
        return list(dict.fromkeys(used))

    @property
    def extra_columns(self) -> list[Field]:
        """The fields to add to the usual table: parameters and metrics that decide what is listed, and where."""
        return [field for field in self.fields if field.kind or field.name not in FIELDS]

    @property
    def needs_metrics(self) -> bool:
        """Whether metrics.jsonl of the runs is read."""
        return any(field.kind == "best" for field in self.fields)

    def apply(self, views: Iterable[RunView]) -> list[RunFields]:
        """Return the runs that match, sorted."""
        runs = [RunFields(view) for view in views]
        matching = [run for run in runs if self.where is None or self.where.matches(run)]
        for key in reversed(self.sort):  # sorting is stable: the first key is the last to be applied
            with_value = [run for run in matching if _rank_of(run(key.field)) is not None]
            without = [run for run in matching if _rank_of(run(key.field)) is None]
            matching = (
                sorted(with_value, key=lambda run: _rank_of(run(key.field)) or (), reverse=key.descending) + without
            )
        return matching

    def unknown_fields(self, views: Sequence[RunView]) -> list[str]:
        """Return a message for each field that no run has: it may be misspelled, or text without quotes."""
        runs = [RunFields(view) for view in views]
        unknown = [field for field in self.extra_columns if all(run(field) is None for run in runs)] if runs else []
        if not unknown:
            return []
        metrics = {name for view in views for name in view.record.last_metrics}
        params = {PARAMS + str(name) for view in views for name in params_of(view)}
        known = sorted({*FIELDS, *metrics, *params})
        return [_unknown(field, known) for field in unknown]


def _unknown(field: Field, known: Sequence[str]) -> str:
    hint = did_you_mean(field.name, known) if len(known) <= 30 else ""
    text = "" if field.kind else f'; text is written in quotes, as "{shorten(field.name, 40)}"'
    return f"no run has {shorten(str(field))}{f': {hint}' if hint else ''}{text}"


def _named(option: str, parse: Any) -> Any:
    try:
        return parse()
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _sort_keys(text: str) -> list[SortKey]:
    """Parse `val/loss` or `-started,name`; a minus sorts from large to small."""
    parts = [part.strip() for part in text.split(",")]
    return [SortKey(parse_fields(part.removeprefix("-"))[0], part.startswith("-")) for part in parts]


def _rank_of(value: Any) -> tuple[int, Any] | None:
    """Return a sort key for values of any type; None for a missing one."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, int | float):  # also true and false
        return 0, value
    return 1, value if isinstance(value, str) else json.dumps(value, default=str)


def header(fields: Sequence[Field]) -> list[str]:
    """Return the titles of columns: fields in capitals; names of metrics and parameters as they are."""
    return [str(field).upper() if not field.kind and field.name in FIELDS else str(field) for field in fields]


def cells(run: RunFields, fields: Sequence[Field]) -> list[str]:
    """Return the values of a run as text, "-" for none."""
    return [clean_line(_cell(field, run(field))) for field in fields]


def _cell(field: Field, value: Any) -> str:
    if not field.kind and field.name in _SECONDS:
        return duration(value)
    if not field.kind and field.name in _TIMES:
        parsed = parse_time(value)
        return f"{parsed:%Y-%m-%d %H:%M:%S}" if parsed else "-"
    return value_text(value)


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
