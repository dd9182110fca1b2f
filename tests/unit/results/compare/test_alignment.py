from __future__ import annotations

import math
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.compare.alignment import (
    Alignment,
    active_s,
    aligned,
    best_alignment,
    samples_at,
    samples_by_step,
)
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import AllSeries, Series
from ddptrain.results.run_record import AttemptRecord, RunRecord

ATTEMPTS = (
    AttemptRecord(1, "2025-01-01T00:00:00Z", "2025-01-01T00:00:10Z"),
    AttemptRecord(2, "2025-01-01T01:00:00Z", None),
)
START = 1735689600.0  # 2025-01-01T00:00:00Z


def series(steps: list[float | None], values: list[float], at_s: float = 5.0, epoch: float | None = None) -> Series:
    return Series([START + at_s + n for n in range(len(steps))], steps, [epoch] * len(steps), values)


def view(*attempts: AttemptRecord) -> RunView:
    return RunView(RunLayout(Path("runs/r-1")), RunRecord(run_id="r-1", attempts=attempts))


RUN: AllSeries = {
    ("loss", 0): series([1, 2, 3], [3.0, 2.0, 1.0]),
    ("loss", 1): series([1, 2, 3], [5.0, 4.0, math.nan], at_s=5.5),
    ("samples", 0): series([1, 3], [10.0, 30.0]),
    ("samples", 1): series([1, 3], [12.0, 34.0]),
}


def test_by_step_a_curve_is_the_mean_over_the_ranks() -> None:
    assert aligned(view(), RUN, "loss", Alignment.STEP) == ([1, 2, 3], [4.0, 3.0, 1.0])
    assert aligned(view(), RUN, "other", Alignment.STEP) is None


def test_by_time_ranks_are_put_together_by_their_steps() -> None:
    assert aligned(view(), RUN, "loss", Alignment.TIME) == ([0.25, 1.25, 2.25], [4.0, 3.0, 1.0])
    assert aligned(view(*ATTEMPTS), RUN, "loss", Alignment.TIME) == ([5.25, 6.25, 7.25], [4.0, 3.0, 1.0])


def test_by_samples_those_of_all_ranks_count() -> None:
    assert samples_by_step(RUN) == ([1, 3], [22.0, 64.0])
    assert aligned(view(), RUN, "loss", Alignment.SAMPLES) == ([22.0, 43.0, 64.0], [4.0, 3.0, 1.0])


@pytest.mark.parametrize(("step", "samples"), [(0, 0), (1, 22), (2, 43), (3, 64), (4, None), (0.5, 11)])
def test_samples_are_interpolated(step: float, samples: float | None) -> None:
    assert samples_at(([1, 3], [22.0, 64.0]), step) == samples


def test_a_rank_that_has_not_logged_its_samples_counts_as_the_others() -> None:
    lost: AllSeries = {("samples", 0): series([1, 2], [10.0, 20.0]), ("samples", 1): series([1], [12.0])}
    assert samples_by_step(lost) == ([1, 2], [22.0, 40.0])


@pytest.mark.parametrize(("at_s", "seconds"), [(4, 4), (10, 10), (1800, 10), (3605, 15)])
def test_time_without_ranks_does_not_count(at_s: float, seconds: float) -> None:
    assert active_s(ATTEMPTS, START + at_s, START) == seconds


def test_what_has_no_position_is_an_error_that_names_the_run() -> None:
    run: AllSeries = {("loss", 0): series([None, None], [2.0, 1.0])}
    with pytest.raises(UsageError, match="run r-1 has logged loss without step; choose another --align"):
        aligned(view(), run, "loss", Alignment.STEP)
    with pytest.raises(UsageError, match=r'log it with ctx.log\(\{"samples": \.\.\.\}\)'):
        aligned(view(), run, "loss", Alignment.SAMPLES)
    assert aligned(view(), run, "loss", Alignment.TIME) == ([0.0, 1.0], [2.0, 1.0])


def test_the_axis_is_one_that_all_runs_have() -> None:
    by_epoch: AllSeries = {("loss", 0): series([None], [1.0], epoch=1.0)}
    with_both: AllSeries = {("loss", 0): series([1], [1.0], epoch=1.0), ("x", 0): series([None], [1.0])}
    assert best_alignment([RUN, with_both], ["loss"]) is Alignment.STEP
    assert best_alignment([by_epoch, with_both], ["loss"]) is Alignment.EPOCH
    assert best_alignment([by_epoch, RUN], ["loss"]) is Alignment.TIME
