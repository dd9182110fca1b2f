"""The end of a run tells one number a metric, and always the same one."""

from __future__ import annotations

from ddptrain.results.metrics import AllSeries, LatestMetrics, Series


def test_value_is_the_mean_of_the_ranks_at_the_newest_step() -> None:
    latest = LatestMetrics()
    latest.logged(0, 1, {"loss": 9.0})
    latest.logged(0, 2, {"loss": 1.0, "only": 5.0})
    assert latest.as_dict() == {"loss": 1.0, "only": 5.0}
    latest.logged(1, 1, {"loss": 7.0})  # a rank that is behind
    latest.logged(1, 2, {"loss": 3.0})
    assert latest.as_dict() == {"loss": 2.0, "only": 5.0}
    latest.logged(1, 2, {"loss": 5.0})  # once more for the same step
    assert latest.as_dict()["loss"] == 3.0


def test_what_ranks_logged_counts_before_the_value_of_a_checkpoint() -> None:
    for saved_first in (False, True):
        latest = LatestMetrics()
        if saved_first:
            latest.saved(2, {"loss": 0.5, "val/loss": 0.7})
        latest.logged(0, 2, {"loss": 1.0})
        latest.logged(1, 2, {"loss": 3.0})
        if not saved_first:
            latest.saved(2, {"loss": 0.5, "val/loss": 0.7})
        assert latest.as_dict() == {"loss": 2.0, "val/loss": 0.7}
        latest.logged(0, 3, {"loss": 4.0})
        latest.saved(2, {"loss": 0.1})  # it came home late
        assert latest.as_dict() == {"loss": 4.0, "val/loss": 0.7}


def test_values_without_a_step_are_the_newest_of_each_rank() -> None:
    latest = LatestMetrics()
    latest.logged(0, None, {"loss": 1.0})
    latest.logged(1, None, {"loss": 2.0})
    latest.logged(0, None, {"loss": 4.0})
    assert latest.as_dict() == {"loss": 3.0}
    latest.saved(5, {"loss": 0.5})
    latest.logged(0, None, {"loss": 8.0})
    assert latest.as_dict() == {"loss": 8.0}


def test_attempt_that_begins_at_an_earlier_step_counts_more_than_the_one_before() -> None:
    latest = LatestMetrics()
    latest.begin_attempt({"loss": 3.0, "gone": 1.0, "unknown": None})
    assert latest.as_dict() == {"loss": 3.0, "gone": 1.0}
    latest.logged(0, 10, {"loss": 2.0})
    latest.logged(0, 11, {"loss": 1.5})
    latest.begin_attempt()
    assert latest.as_dict()["loss"] == 1.5
    latest.logged(0, 6, {"loss": 1.8})
    assert latest.as_dict() == {"loss": 1.8, "gone": 1.0}


def test_values_of_a_run_are_those_of_its_series_and_checkpoints() -> None:
    series: AllSeries = {
        ("loss", 0): Series(step=[1, 2, 3], value=[9.0, 4.0, float("nan")]),
        ("loss", 1): Series(step=[1, 2, None], value=[7.0, 6.0, 8.0]),
        ("acc", 0): Series(step=[1, 2], value=[0.25, 0.5]),
    }
    assert LatestMetrics.of(series, [(2, {"acc": 0.75, "f1": 0.6})]).as_dict() == {"loss": 6.0, "acc": 0.5, "f1": 0.6}
    del series["loss", 1]
    assert LatestMetrics.of(series, []).as_dict() == {"loss": 4.0, "acc": 0.5}
