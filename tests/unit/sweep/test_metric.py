"""The value of the metric at each step."""

from __future__ import annotations

import math

from ddptrain.sweep.home import LiveMetric, best_value, values_by_step


def test_a_step_is_complete_when_all_ranks_have_logged_it() -> None:
    live = LiveMetric(world_size=2)
    assert live.logged(0, 10, 1.0) == []
    assert live.logged(1, 10, 3.0) == [(10.0, 2.0)]


def test_a_step_that_one_rank_logs_is_complete_with_the_next_and_later_at_once() -> None:
    live = LiveMetric(world_size=2)
    assert live.logged(0, 10, 1.0) == []
    assert live.logged(0, 20, 2.0) == [(10.0, 1.0), (20.0, 2.0)]
    assert live.logged(0, 30, 3.0) == [(30.0, 3.0)]


def test_who_logs_is_known_from_an_earlier_trial() -> None:
    live = LiveMetric(world_size=2)
    live.logged(0, 10, 1.0)
    live.saved(20, 1.0)
    assert live.usual == {0}
    assert LiveMetric(world_size=2, usual=live.usual).logged(0, 10, 1.0) == [(10.0, 1.0)]


def test_the_value_of_a_checkpoint_counts() -> None:
    live = LiveMetric(world_size=2)
    assert live.logged(0, 10, 1.0) == []
    assert live.saved(10, 1.5) == [(10.0, 1.5)]
    assert live.saved(20, 1.2) == [(20.0, 1.2)]


def test_steps_that_a_restart_repeats_are_ignored() -> None:
    live = LiveMetric(world_size=1)
    assert live.logged(0, 10, 1.0) == [(10.0, 1.0)]
    assert live.logged(0, 5, 9.0) == []
    assert live.saved(10, 9.0) == []
    assert live.logged(0, 11, 2.0) == [(11.0, 2.0)]


def test_values_without_a_step_are_counted() -> None:
    live = LiveMetric(world_size=1)
    assert live.logged(0, None, 5.0) == [(1.0, 5.0)]
    assert live.logged(0, None, 4.0) == [(2.0, 4.0)]


def test_values_of_a_run_are_means_unless_a_checkpoint_has_them() -> None:
    logged = [(2.0, 4.0), (1.0, 1.0), (1.0, 3.0)]
    assert list(values_by_step(logged, {2.0: 3.5, 3.0: 1.0}).items()) == [(1.0, 2.0), (2.0, 3.5), (3.0, 1.0)]


def test_the_best_value_is_finite() -> None:
    assert best_value([3.0, math.nan, 1.0, -math.inf], "min") == 1.0
    assert best_value([3.0, math.inf], "max") == 3.0
    assert best_value([math.nan], "min") is None
