"""The curves of a run: every metric of every rank and the mean of the ranks, thinned without losing extremes."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ddptrain.config.wording import shorten
from ddptrain.results.metrics import AllSeries, LineReader, MetricsReader, drop_replaced, series_of
from ddptrain.results.run import Run, parse_time
from ddptrain.results.system import read_system, system_series

MEAN = "mean"
_READ_BYTES = 64 << 20  # the end of a larger metrics.jsonl
_MOST_METRICS, _MOST_RANKS = 200, 64  # the metrics that most lines have, the first ranks
_MOST_POINTS, _LEAST_POINTS = 4000, 60  # of a curve
_NAME_CHARACTERS = 200
_LARGEST = 1e37  # larger numbers count as missing: float32 does not have them
_POSITION = ("time_s", "step", "epoch", "rank", "attempt")
_AXES = ("step", "epoch", "time")

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one rank, or the mean of the ranks (rank MEAN; also if all ranks have logged the same values).

    The arrays have the same length. time: seconds since the start of the run. A missing value is NaN.
    """

    metric: str
    rank: int | str
    step: Array
    epoch: Array
    time: Array
    value: Array

    def at(self, index: NDArray[np.intp]) -> Line:
        """Return the line with these points alone."""
        return replace(self, **{name: getattr(self, name)[index] for name in (*_AXES, "value")})


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """Last, smallest and largest value of a metric (the mean of the ranks).

    The last one is NaN if it is not finite; the others are None if no value is finite.
    """

    name: str
    last: float
    least: float | None
    most: float | None
    points: int

    @classmethod
    def of(cls, line: Line) -> MetricSummary:
        """Return the summary of a line."""
        finite = line.value[np.isfinite(line.value)]
        least, most = (float(finite.min()), float(finite.max())) if len(finite) else (None, None)
        return cls(line.metric, float(line.value[-1]), least, most, len(line.value))


def read_lines(view: Run) -> list[Line]:
    """Return the curves of a run: of each metric the mean, then the ranks, unless all ranks have the same values.

    Of a metrics.jsonl above 64 MiB the end counts; of more than 200 metrics, those that were logged most often. Raises
    ResultsError if the file can't be read.
    """
    raw = LineReader(view.metrics_jsonl, _READ_BYTES).lines()
    try:
        logged = _columns(from_json(b"[" + b",".join(filter(None, raw)) + b"]", cache_strings="keys"))
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError):  # several attempts, or damaged lines
        lines = drop_replaced(MetricsReader(view.metrics_jsonl, _READ_BYTES).read())
        logged = _lines_of(series_of(lines))
    counts = Counter[str]()
    for line in logged:
        counts[line.metric] += len(line.value)
    names = {name for name, _ in counts.most_common(_MOST_METRICS)}
    ranks = set(sorted({int(line.rank) for line in logged})[:_MOST_RANKS])
    kept = [line for line in logged if line.metric in names and line.rank in ranks]
    found: list[Line] = []
    for _, of_metric in groupby(_from_start(view, kept), key=lambda line: line.metric):
        each = list(of_metric)
        first = replace(each[0], rank=MEAN)
        if all(_is_same(line, first) for line in each):
            found.append(first)
        else:
            found += [*_mean(each), *each]
    return found


def read_system_lines(view: Run) -> list[Line]:
    """Return the curves of the system metrics of a run by time. Raises ResultsError if the file can't be read."""
    lines = _lines_of(system_series(read_system(view.system_jsonl)))
    return _from_start(view, [line for line in lines if int(line.rank) < _MOST_RANKS])


def _columns(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """Return the lines of rows of one attempt. Raises ValueError for several attempts, and other errors for no rows."""
    shapes: defaultdict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        shapes[tuple(row)].append(row)
    parts: defaultdict[tuple[str, int], list[Line]] = defaultdict(list)
    attempts = set[float]()
    for names, alike in shapes.items():
        table = _table(alike, len(names))
        column = dict(zip(names, table.T, strict=True))
        attempts |= {*np.unique(column["attempt"])} if "attempt" in column else {1.0}
        for rank in np.unique(column["rank"]):
            own = {name: values[column["rank"] == rank] for name, values in column.items()}
            nothing = np.full(len(own["rank"]), np.nan)
            step, epoch, time_s = (own.get(name, nothing) for name in ("step", "epoch", "time_s"))
            for name in (name for name in names if name not in _POSITION):
                parts[name, int(rank)].append(Line(name, int(rank), step, epoch, time_s, own[name]))
    if len(attempts) > 1:
        raise ValueError("rows of several attempts")
    return [_joined(lines) for lines in parts.values()]


def _table(rows: Sequence[dict[str, Any]], width: int) -> Array:
    """Return the values of rows with the same keys; None is NaN. Raises ValueError, TypeError for others."""
    try:
        values = np.fromiter(chain.from_iterable(map(dict.values, rows)), np.float64, len(rows) * width)
    except TypeError:  # None
        values = np.array([list(row.values()) for row in rows], np.float64)
    return values.reshape(len(rows), width)


def _joined(lines: Sequence[Line]) -> Line:
    if len(lines) == 1:
        return lines[0]
    step, epoch, time, value = (np.concatenate([getattr(line, name) for line in lines]) for name in (*_AXES, "value"))
    return Line(lines[0].metric, lines[0].rank, step, epoch, time, value).at(np.argsort(time, kind="stable"))


def _lines_of(series: AllSeries) -> list[Line]:
    def floats(values: Sequence[float | None]) -> Array:
        return np.array(values, np.float64)  # None becomes NaN

    return [
        Line(name, rank, *(floats(values) for values in (one.step, one.epoch, one.time_s, one.value)))
        for (name, rank), one in series.items()
    ]


def _from_start(view: Run, lines: Sequence[Line]) -> list[Line]:
    """Return the lines in the order of names and ranks, with times since the start and without extreme numbers."""
    began = parse_time(view.record.started_at)
    start = began.timestamp() if began else min((float(np.nanmin(line.time)) for line in lines), default=0.0)

    def usable(values: Array) -> Array:
        return np.where(np.abs(values) <= _LARGEST, values, np.nan)

    with np.errstate(invalid="ignore", over="ignore"):
        found = [
            Line(
                shorten(line.metric, _NAME_CHARACTERS),
                line.rank,
                *(usable(values) for values in (line.step, line.epoch, line.time - start, line.value)),
            )
            for line in lines
        ]
    return sorted(found, key=lambda line: (line.metric, line.rank))


def _is_same(one: Line, other: Line) -> bool:
    return np.array_equal(one.step, other.step, equal_nan=True) and np.array_equal(one.value, other.value, True)


def _mean(ranks: Sequence[Line]) -> list[Line]:
    """At each step the mean over the ranks with a finite value there; none if points have no step."""
    every = {name: np.concatenate([getattr(line, name) for line in ranks]) for name in (*_AXES, "value")}
    if np.isnan(every["step"]).any():
        return []
    steps, first, at = np.unique(every["step"], return_index=True, return_inverse=True)
    is_finite = np.isfinite(every["value"])
    sums = np.bincount(at, np.where(is_finite, every["value"], 0.0), len(steps))
    with np.errstate(invalid="ignore", divide="ignore"):
        value = sums / np.bincount(at, is_finite, len(steps))  # NaN where no rank has a finite value
    return [Line(ranks[0].metric, MEAN, steps, every["epoch"][first], every["time"][first], value)]


def thinned(line: Line, most: int) -> Line:
    """Return at most `most` points (6 at least): the first, the last, and the extremes of equal parts of the line.

    Missing values stay visible: of each part that has one, the first is kept.
    """
    count = len(line.value)
    if count <= max(6, most):
        return line
    is_missing = ~np.isfinite(line.value)
    parts = max(1, (most - 2) // (3 if is_missing.any() else 2))
    part = np.arange(count) * parts // count
    kept = [np.array([0, count - 1])]
    finite, missing = np.flatnonzero(~is_missing), np.flatnonzero(is_missing)
    if len(finite):
        order = finite[np.lexsort((line.value[finite], part[finite]))]
        ends = np.flatnonzero(np.diff(part[order]))
        kept += [order[np.append(ends, len(order) - 1)], order[np.append(0, ends + 1)]]  # largest, smallest
    if len(missing):
        kept.append(missing[np.unique(part[missing], return_index=True)[1]])
    return line.at(np.unique(np.concatenate(kept)))


def summaries(lines: Sequence[Line]) -> list[MetricSummary]:
    """Return one summary for each metric, of the first curve of each: the mean if there is one."""
    first: dict[str, Line] = {}
    for line in lines:
        first.setdefault(line.metric, line)
    return [MetricSummary.of(line) for line in first.values()]


def page_data(lines: Sequence[Line], points: int) -> list[dict[str, Any]]:
    """Return the curves as the page's script reads them: float32 in base64, about `points` points together at most."""
    most = max(_LEAST_POINTS, min(_MOST_POINTS, points // max(1, len(lines))))
    found = []
    for line in lines[: max(1, points // _LEAST_POINTS)]:
        shown = thinned(line, most)
        data: dict[str, Any] = {"metric": line.metric, "rank": line.rank, "y": _base64(shown.value)}
        found.append(data | {name: _base64(at) for name in _AXES if np.isfinite(at := getattr(shown, name)).all()})
    return found


def _base64(values: Array) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
