"""The curves of a run: every metric of every rank and the mean of the ranks, thinned without losing extremes."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddptrain.config.wording import shorten
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import AllSeries, MetricLine, MetricsReader, Series, drop_replaced, series_of
from ddptrain.results.system import read_system, system_series

MEAN = "mean"
_READ_BYTES = 64 << 20  # the end of a larger metrics.jsonl
_MOST_METRICS = 200  # the names that most lines have
_MOST_RANKS = 64
_MOST_POINTS = 4000  # of a curve
_LEAST_POINTS = 60
_NAME_CHARACTERS = 200
_LARGEST_PLACE, _LARGEST_VALUE = 1e15, 1e150  # larger numbers count as missing: a chart cannot place them


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one rank, or the mean of the ranks (rank MEAN; also if all ranks have logged the same values).

    The arrays have the same length. time: seconds since the start of the run. A missing value is NaN.
    """

    metric: str
    rank: int | str
    step: NDArray[np.float64]
    epoch: NDArray[np.float64]
    time: NDArray[np.float64]
    value: NDArray[np.float64]

    def at(self, index: NDArray[np.intp]) -> Line:
        """Return the line with these points alone."""
        return replace(
            self, step=self.step[index], epoch=self.epoch[index], time=self.time[index], value=self.value[index]
        )


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


def read_lines(view: RunView) -> list[Line]:
    """Return the curves of a run with all points, ordered by metric; the mean of the ranks comes first.

    Of a metrics.jsonl above 64 MiB the end counts; of more than 200 metrics, those that were logged most often. Raises
    ResultsError if the file can't be read.
    """
    logged = MetricsReader(view.layout.metrics_jsonl, _READ_BYTES).read()
    series = series_of(drop_replaced(_bounded(logged)))
    start = _start(view, series)
    return [line for name in sorted({name for name, _ in series}) for line in _of_metric(name, series, start)]


def read_system_lines(view: RunView) -> list[Line]:
    """Return the curves of the system metrics of a run by time. Raises ResultsError if the file can't be read."""
    series = system_series(read_system(view.layout.system_jsonl))
    start = _start(view, series)
    shown = ((name, where, one) for (name, where), one in sorted(series.items()) if where < _MOST_RANKS)
    return [_line(name, where, one, start) for name, where, one in shown]


def _start(view: RunView, series: AllSeries) -> float:
    """Return when the run began, in seconds since 1970; the time of the first value if it is not known."""
    began = parse_time(view.record.started_at)
    return began.timestamp() if began else min((one.time_s[0] for one in series.values()), default=0.0)


def _bounded(lines: Sequence[MetricLine]) -> list[MetricLine]:
    """Return the lines with shortened names, and without the metrics and ranks that are too many."""
    counts = Counter(name for line in lines for name in line.values)
    short = {name: shorten(name, _NAME_CHARACTERS) for name, _ in counts.most_common(_MOST_METRICS)}
    every_rank = {line.rank for line in lines}
    ranks = set(sorted(every_rank)[:_MOST_RANKS])
    if len(ranks) == len(every_rank) and len(short) == len(counts) and all(name == own for name, own in short.items()):
        return list(lines)
    return [
        replace(line, values={short[name]: value for name, value in line.values.items() if name in short})
        for line in lines
        if line.rank in ranks
    ]


def _of_metric(name: str, series: AllSeries, start: float) -> list[Line]:
    ranks = [_line(name, rank, one, start) for (metric, rank), one in sorted(series.items()) if metric == name]
    first = ranks[0]
    if all(_is_same(line, first) for line in ranks):
        return [replace(first, rank=MEAN)]
    mean = _mean(ranks)
    return [mean, *ranks] if mean is not None else ranks


def _line(name: str, rank: int, series: Series, start: float) -> Line:
    def floats(values: Sequence[float | None], largest: float = _LARGEST_PLACE) -> NDArray[np.float64]:
        found = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        return np.where(np.abs(found) <= largest, found, np.nan)

    value = floats(series.value, _LARGEST_VALUE)
    return Line(name, rank, floats(series.step), floats(series.epoch), floats(series.time_s) - start, value)


def _is_same(one: Line, other: Line) -> bool:
    return np.array_equal(one.step, other.step, equal_nan=True) and np.array_equal(one.value, other.value, True)


def _mean(ranks: Sequence[Line]) -> Line | None:
    """At each step the mean over the ranks with a finite value there; None if points have no step."""
    every = {
        field: np.concatenate([getattr(line, field) for line in ranks]) for field in ("step", "epoch", "time", "value")
    }
    if np.isnan(every["step"]).any():
        return None
    steps, first, at = np.unique(every["step"], return_index=True, return_inverse=True)
    is_finite = np.isfinite(every["value"])
    sums = np.bincount(at, np.where(is_finite, every["value"], 0.0), len(steps))
    counts = np.bincount(at, is_finite, len(steps))
    with np.errstate(invalid="ignore", divide="ignore"):
        value = sums / counts  # NaN where no rank has a finite value
    return Line(ranks[0].metric, MEAN, steps, every["epoch"][first], every["time"][first], value)


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
    return [_summary(line) for line in first.values()]


def _summary(line: Line) -> MetricSummary:
    finite = line.value[np.isfinite(line.value)]
    least, most = (float(finite.min()), float(finite.max())) if len(finite) else (None, None)
    return MetricSummary(line.metric, float(line.value[-1]), least, most, len(line.value))


def page_data(lines: Sequence[Line], points: int) -> list[dict[str, Any]]:
    """Return the curves as the page's script reads them, with at most about `points` points together."""
    most = max(_LEAST_POINTS, min(_MOST_POINTS, points // max(1, len(lines))))
    shown = lines[: max(1, points // _LEAST_POINTS)]
    return [_encoded(thinned(line, most)) for line in shown]


def _encoded(line: Line) -> dict[str, Any]:
    data: dict[str, Any] = {"metric": line.metric, "rank": line.rank, "y": _base64(line.value, "<f8")}
    for name, values, kind in (("step", line.step, "<f8"), ("epoch", line.epoch, "<f4"), ("time", line.time, "<f4")):
        if np.isfinite(values).all():
            data[name] = _base64(values, kind)
    return data


def _base64(values: NDArray[np.float64], kind: str) -> str:
    return base64.b64encode(values.astype(kind).tobytes()).decode()
