"""Reads metrics.jsonl and events.jsonl while they grow. Incomplete and damaged lines are skipped.

A run that is started again repeats steps, so metrics.jsonl may have several values of a step. The file itself says
which one counts: an attempt goes on where its first line says, which has the step of its checkpoint and no values, if
it has one. What earlier attempts logged after it does not count; of two values of a step that of the later attempt
does. See drop_replaced().
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeGuard

from ddptrain.file_ops import open_regular
from ddptrain.results.errors import results_errors

_POSITION = frozenset(("time_s", "step", "epoch", "rank", "attempt"))


@dataclass(frozen=True, slots=True)
class MetricLine:
    """Numbers that a rank logged in one call; a value is None if it was NaN or infinite.

    `attempt` is 1 in files of older versions, whose lines do not have it.
    """

    time_s: float
    step: float | None
    epoch: float | None
    rank: int
    values: dict[str, float | None]
    attempt: int = 1


@dataclass(slots=True)
class Series:
    """One metric of one rank; the lists have the same length, and a missing value is NaN."""

    time_s: list[float] = field(default_factory=list)
    step: list[float | None] = field(default_factory=list)
    epoch: list[float | None] = field(default_factory=list)
    value: list[float] = field(default_factory=list)


AllSeries = dict[tuple[str, int], Series]  # by the name of the metric, and the rank


class LineReader:
    """Reads the lines that were appended to a file since the last call."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """`last_bytes`: if the file is larger, only its end is read."""
        self._path = path
        self._offset = 0  # of the next line
        self._last_bytes = last_bytes

    def lines(self) -> list[bytes]:
        """Return the new complete lines; none if there is no file. An incomplete last line is read later.

        Raises ResultsError if the file can't be read.
        """
        with results_errors(self._path, "read"):
            try:
                descriptor = open_regular(self._path)
            except FileNotFoundError:
                return []
            with os.fdopen(descriptor, "rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset = 0  # the file was replaced
                if self._offset == 0 and self._last_bytes is not None and size > self._last_bytes:
                    file.seek(size - self._last_bytes - 1)
                    self._offset = size - self._last_bytes - 1 + len(file.readline())  # whole lines alone
                file.seek(self._offset)
                data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.split(b"\n")


class MetricsReader(LineReader):
    """Reads metrics.jsonl."""

    def read(self) -> list[MetricLine]:
        """Return the new complete lines; see lines()."""
        return [line for raw in self.lines() if (line := _parse(raw)) is not None]


def _parse(raw: bytes) -> MetricLine | None:
    fields = json_object(raw)
    if not isinstance(fields.get("rank"), int):
        return None
    values = {
        name: finite_number(value)
        for name, value in fields.items()
        if name not in _POSITION and (value is None or is_number(value))
    }
    return MetricLine(
        finite_number(fields.get("time_s")) or 0.0,
        finite_number(fields.get("step")),
        finite_number(fields.get("epoch")),
        fields["rank"],
        values,
        attempt if isinstance(attempt := fields.get("attempt"), int) else 1,
    )


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a line; an empty one for other content."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of JSON is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite_number(value: object) -> float | None:
    """Return a value of JSON as a float; None if it is no number, not finite, or too large for a float."""
    try:
        number = float(value) if is_number(value) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def drop_replaced(lines: Sequence[MetricLine]) -> list[MetricLine]:
    """Return the lines without values that a later attempt has replaced, and without lines that have no values.

    An attempt replaces each value that it logs again, and what earlier attempts logged after its first line: that of
    its checkpoint, which has no values, or else the first one that its ranks logged.
    """
    first: dict[tuple[int, bool], float] = {}  # by attempt, and whether it is a step or the epoch of lines without one
    newest: dict[tuple[str, int, bool, float], int] = {}
    for line in lines:
        places = [(True, line.step), (False, line.epoch)] if not line.values else [_place(line)]
        for is_step, at in places:
            if at is not None:
                key = line.attempt, is_step
                first[key] = min(at, first.get(key, at))
                newest |= {(name, line.rank, is_step, at): line.attempt for name in line.values}
    kept = []
    for line in lines:
        is_step, at = _place(line)
        values = line.values
        if at is not None:
            if any(number > line.attempt and kind == is_step and at > begin for (number, kind), begin in first.items()):
                continue
            values = {name: of for name, of in values.items() if newest[name, line.rank, is_step, at] == line.attempt}
        if values:
            kept.append(line if len(values) == len(line.values) else replace(line, values=values))
    return kept


def _place(line: MetricLine) -> tuple[bool, float | None]:
    return (True, line.step) if line.step is not None else (False, line.epoch)


def continued_line(attempt: int, step: int, epoch: float | None) -> dict[str, object]:
    """Return the first line of an attempt that continues from a checkpoint: earlier attempts count up to there."""
    return {"time_s": time.time(), "step": step, "epoch": epoch, "rank": 0, "attempt": attempt}


def read_series(path: Path) -> AllSeries:
    """Return every metric of every rank in the file, without replaced values."""
    return series_of(drop_replaced(MetricsReader(path).read()))


def series_of(lines: Iterable[MetricLine]) -> AllSeries:
    """Return every metric of every rank in the lines."""
    series: AllSeries = {}
    for line in lines:
        for name, value in line.values.items():
            rank_series = series.setdefault((name, line.rank), Series())
            rank_series.time_s.append(line.time_s)
            rank_series.step.append(line.step)
            rank_series.epoch.append(line.epoch)
            rank_series.value.append(math.nan if value is None else value)
    return series


class LatestMetrics:
    """Defines `last_metrics`: the value of each metric at its newest step.

    It is the mean over the ranks that logged the metric at this step, as in the curves; if none did, the value of the
    checkpoint of this step. A value logged without a step is newer than all earlier values of its rank.
    """

    def __init__(self) -> None:
        # By metric: its newest step, and the values there by rank; None stands for a checkpoint.
        self._latest: dict[str, tuple[int | None, dict[int | None, float]]] = {}
        self._old: set[str] = set()  # metrics of an earlier attempt: any new value replaces them

    @classmethod
    def of(cls, series: AllSeries, saved: Iterable[tuple[int, Mapping[str, float]]]) -> Self:
        """Return the values of a run from the metrics of its ranks, and the steps and metrics of its checkpoints."""
        latest = cls()
        for (name, rank), rank_series in series.items():
            for step, value in zip(rank_series.step, rank_series.value, strict=True):
                if not math.isnan(value):
                    latest.logged(rank, None if step is None else int(step), {name: value})
        for step, metrics in saved:
            latest.logged(None, step, metrics)
        return latest

    def begin_attempt(self, known: Mapping[str, float | None] | None = None) -> None:
        """Begin an attempt, whose steps may start again at a lower number; `known`: the values of a resumed run."""
        self._latest |= {name: (None, {None: value}) for name, value in (known or {}).items() if value is not None}
        self._old = set(self._latest)

    def logged(self, rank: int | None, step: int | None, values: Mapping[str, float]) -> None:
        """Add values that a rank has logged, or (None) those of a checkpoint."""
        for name, value in values.items():
            newest, at = self._latest.get(name, (step, {}))
            if not at or name in self._old or (step is not None and (newest is None or step > newest)):
                self._old.discard(name)
                newest, at = self._latest[name] = step, {}
            if step is None or newest is None or step == newest:
                at[rank] = value

    def as_dict(self) -> dict[str, float]:
        """Return the values for run.json."""
        found = {}
        for name, (_, at) in self._latest.items():
            values = [value for rank, value in at.items() if rank is not None] or [*at.values()]
            found[name] = sum(values) / len(values)
        return found


LAST_BYTES = 16 << 20  # the end of the file, which contains the last attempt
_LONGEST_LINE_BYTES = 1 << 20
_LARGEST_S = 1e12


def read_events(path: Path, kinds: Collection[str], last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of these kinds, each with a number as `time_s`. last_bytes: only from the end of a larger file.

    Damaged lines and lines above 1 MiB are skipped; a file that cannot be read has no events.
    """
    marks = [f'"event":"{kind}"'.encode() for kind in kinds]
    try:
        descriptor = open_regular(path)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        while line := file.readline(_LONGEST_LINE_BYTES):
            event = json_object(line) if any(mark in line for mark in marks) else {}
            if event.get("event") in kinds and is_time(event.get("time_s")):
                yield event


def is_time(value: object) -> bool:
    """Return whether a value of JSON is a possible number of seconds."""
    return isinstance(value, int | float) and -_LARGEST_S < value < _LARGEST_S  # also false for NaN
