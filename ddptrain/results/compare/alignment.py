"""Aligns the curves of several runs on one axis: step, epoch, time or samples."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from enum import StrEnum

from ddptrain.errors import UsageError
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import AllSeries, Series
from ddptrain.results.run_record import AttemptRecord
from ddptrain.results.show.curves import Points, mean_of, thinned

SAMPLES = "samples"  # the name of a metric: how many samples the rank has used since the start


class Alignment(StrEnum):
    """The axis on which runs are aligned.

    time: seconds in which the run had ranks. samples: the sum over all ranks of the metric `samples`.
    """

    STEP = "step"
    EPOCH = "epoch"
    TIME = "time"
    SAMPLES = "samples"

    @property
    def x_name(self) -> str:
        """The name of the axis in Plot."""
        return "time_s" if self is Alignment.TIME else str(self)


def best_alignment(runs: Sequence[AllSeries], metrics: Sequence[str]) -> Alignment:
    """Return STEP if every value of these metrics has a step, else EPOCH if every value has an epoch, else TIME."""
    for alignment in (Alignment.STEP, Alignment.EPOCH):
        chosen = [rank_series for series in runs for (name, _), rank_series in series.items() if name in metrics]
        if all(None not in getattr(rank_series, alignment) for rank_series in chosen):
            return alignment
    return Alignment.TIME


def aligned(view: RunView, series: AllSeries, metric: str, alignment: Alignment) -> Points | None:
    """Return the points of a run's metric, mean over the ranks; None if the run does not have it.

    Values without a position on the axis are left out. Raises UsageError if none has one.
    """
    ranks = [rank_series for (name, _), rank_series in series.items() if name == metric]
    if not ranks:
        return None
    rows: dict[float | str, list[tuple[float, float]]] = {}  # by step, or by call for values without a step
    for rank_series, positions in zip(ranks, _positions(view, series, ranks, alignment), strict=True):
        for number, (x, step, y) in enumerate(zip(positions, rank_series.step, rank_series.value, strict=True)):
            if x is not None:
                rows.setdefault(f"call {number}" if step is None else step, []).append((x, y))
    if not rows:
        hint = f'; log it with ctx.log({{"{SAMPLES}": ...}})' if alignment is Alignment.SAMPLES else ""
        raise UsageError(f"run {view.run_id} has logged {metric} without {alignment}{hint}; choose another --align")
    points = sorted((mean_of([x for x, _ in row]), mean_of([y for _, y in row])) for row in rows.values())
    return thinned(([x for x, _ in points], [y for _, y in points]))


def _positions(
    view: RunView, series: AllSeries, ranks: Sequence[Series], alignment: Alignment
) -> list[list[float | None]]:
    """Return the positions of each rank's values on the axis."""
    match alignment:
        case Alignment.STEP:
            return [rank_series.step for rank_series in ranks]
        case Alignment.EPOCH:
            return [rank_series.epoch for rank_series in ranks]
        case Alignment.TIME:
            start = min(rank_series.time_s[0] for rank_series in series.values())
            return [
                [active_s(view.record.attempts, time_s, start) for time_s in rank_series.time_s]
                for rank_series in ranks
            ]
        case Alignment.SAMPLES:
            known = samples_by_step(series)
            return [
                [None if step is None else samples_at(known, step) for step in rank_series.step]
                for rank_series in ranks
            ]


def active_s(attempts: Sequence[AttemptRecord], time_s: float, start_s: float) -> float:
    """Return for how many seconds a run had ranks until `time_s`; without attempts, the seconds since `start_s`.

    Times are in seconds since 1970.
    """
    total = 0.0
    known = False
    for attempt in attempts:
        began, ended = parse_time(attempt.started_at), parse_time(attempt.ended_at)
        if began is None or began.timestamp() > time_s:
            continue
        until = time_s if ended is None else min(time_s, ended.timestamp())
        total += max(0.0, until - began.timestamp())
        known = True
    return total if known else time_s - start_s


def samples_by_step(series: AllSeries) -> tuple[list[float], list[float]]:
    """Return the logged steps, and for each step how many samples all ranks together had used."""
    ranks: dict[float, list[float]] = {}
    count = 0
    for (name, _), rank_series in series.items():
        if name == SAMPLES:
            count += 1
            for step, value in zip(rank_series.step, rank_series.value, strict=True):
                if step is not None and value == value:
                    ranks.setdefault(step, []).append(value)
    steps = sorted(ranks)
    return steps, [sum(ranks[step]) * count / len(ranks[step]) for step in steps]


def samples_at(known: tuple[list[float], list[float]], step: float) -> float | None:
    """Return the samples used at a step, interpolated between the known steps; None after the last known step.

    At step 0 no samples have been used.
    """
    steps, samples = known
    at = bisect.bisect_left(steps, step)
    if at == len(steps):
        return None
    (before, low), (after, high) = itertools.islice(zip([0.0, *steps], [0.0, *samples], strict=True), at, at + 2)
    return high if after == before else low + (high - low) * (step - before) / (after - before)
