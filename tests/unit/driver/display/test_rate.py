"""The rate is smooth, and what is unknown is not invented."""

from __future__ import annotations

import math

import pytest

from ddptrain.driver.display.run_facts import Pace
from ddptrain.protocol.events import Progress


def pace_of(*points: tuple[float, float], total: float | None = 100.0) -> Pace:
    pace = Pace()
    for time_s, done in points:
        pace.update(Progress(int(time_s * 1e9), done, total, "samples"))
    return pace


def test_steady_progress_has_its_rate_and_eta() -> None:
    pace = pace_of((0, 0), (1, 10), (2, 20), (4, 40))
    assert pace.rate == pytest.approx(10)
    assert pace.eta_s == pytest.approx(6)
    assert pace.fraction == pytest.approx(0.4)


def test_rate_follows_a_change_slowly() -> None:
    pace = pace_of((0, 0), (10, 100), (11, 120), total=1000)
    assert pace.rate == pytest.approx(11.81269)  # 10 + (1 - e^(-1/5)) * (20 - 10)


def test_one_event_has_no_rate() -> None:
    assert (pace_of((0, 5)).rate, pace_of((0, 5)).eta_s) == (None, None)


def test_progress_that_starts_again_starts_its_rate_again() -> None:
    assert pace_of((0, 0), (1, 50), (2, 0)).rate is None


def test_clock_that_stands_or_goes_back_does_no_harm() -> None:
    assert pace_of((5, 0), (5, 10), (4, 20)).rate is None


def test_unknown_total_has_neither_fraction_nor_eta() -> None:
    pace = pace_of((0, 0), (1, 10), total=None)
    assert (pace.fraction, pace.eta_s, pace.rate) == (None, None, 10)


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan, math.inf])
def test_impossible_total_is_no_total(total: float) -> None:
    assert pace_of((0, 1), total=total).fraction is None


def test_impossible_done_is_left_out() -> None:
    assert pace_of((0, 10), (1, math.nan)).done == 10


def test_more_than_all_is_all() -> None:
    pace = pace_of((0, 0), (1, 300))
    assert (pace.fraction, pace.eta_s) == (1.0, 0.0)


def test_less_than_nothing_is_nothing() -> None:
    assert pace_of((0, -5)).fraction == 0.0


def test_other_unit_starts_a_new_rate() -> None:
    pace = pace_of((0, 0), (1, 10))
    pace.update(Progress(2 * 10**9, 20.0, 100.0, "batches"))
    assert (pace.rate, pace.unit, pace.done) == (None, "batches", 20.0)
    pace.update(Progress(3 * 10**9, 25.0, 100.0, "batches"))
    assert pace.rate == 5.0


def test_progress_that_stands_still_lowers_the_rate() -> None:
    assert pace_of((0, 0), (10, 100), (15, 100)).rate == pytest.approx(3.678794)  # 10 * e^-1


def test_time_since_the_newest_event_counts() -> None:
    assert pace_of((0, 0), (4, 40), (2, 40), (5, 50)).rate == pytest.approx(10)
