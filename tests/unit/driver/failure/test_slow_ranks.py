"""Slow ranks are found by their own times; noise, evaluations and steps that are slow everywhere are none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ddptrain.driver.failure import slow_ranks as module
from ddptrain.driver.failure.slow_ranks import SlowPolicy, SlowRank, Window, slow_ranks
from ddptrain.rank.steps.step_window import StepWindow

OwnTime = Callable[[int, int], float]  # of a rank in a step, in seconds
STEPS = 200


def found(world_size: int, own: OwnTime, *, steps: int = STEPS, factor: float = 1.5) -> list[SlowRank]:
    """The ranks that are reported when ranks with these own times train in step."""
    comparison = SlowPolicy("warn", factor).comparison(world_size)
    assert comparison is not None
    windows = [StepWindow() for _ in range(world_size)]
    slow: list[SlowRank] = []
    now = 0.0
    for step in range(steps):
        times = [own(rank, step) for rank in range(world_size)]
        now += max(times) + 0.01
        for rank, own_s in enumerate(times):
            if (window := windows[rank].add(own_s, max(times) - own_s + 0.01, now)) is not None:
                comparison, new = comparison.after(rank, Window(*window))
                slow += new
    return slow


def numbers(slow: list[SlowRank]) -> list[int]:
    return [one.rank for one in slow]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 33])
@pytest.mark.parametrize("step_s", [0.004, 0.1, 2.0])
def test_one_slow_rank_is_found_and_reported_once(world_size: int, step_s: float) -> None:
    steps = max(STEPS, int(20 / step_s))
    slow = found(world_size, lambda rank, _: step_s * (2.0 if rank == 1 else 1.0), steps=steps)
    assert numbers(slow) == [1]


def test_report_has_the_times_of_the_rank_and_the_median() -> None:
    (slow,) = found(4, lambda rank, _: 0.4 if rank == 2 else 0.2)
    assert slow.rank == 2
    assert slow.own_s == pytest.approx(0.4)
    assert slow.median_s == pytest.approx(0.2)
    assert slow.waited_s == pytest.approx(0.01)
    assert slow.steps >= 20


def test_of_two_ranks_the_slower_one_is_slow_although_it_is_half_of_them() -> None:
    assert numbers(found(2, lambda rank, _: 0.4 if rank == 0 else 0.2)) == [0]


def test_half_of_the_ranks_can_be_slow() -> None:
    assert numbers(found(4, lambda rank, _: 0.4 if rank >= 2 else 0.2)) == [2, 3]


def test_ranks_that_are_all_slow_are_not_reported() -> None:
    assert not found(4, lambda _, step: 0.2 if step < 50 else 2.0)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_slow_rank(seed: int) -> None:
    noise = random.Random(seed)
    assert not found(4, lambda *_: 0.1 * noise.lognormvariate(0.0, 0.5), steps=600)


@pytest.mark.parametrize("seed", range(20))
def test_slow_rank_is_found_in_noise(seed: int) -> None:
    noise = random.Random(seed)
    slow = found(4, lambda rank, _: (0.2 if rank == 3 else 0.1) * noise.lognormvariate(0.0, 0.3), steps=400)
    assert numbers(slow) == [3]


def test_steps_that_are_long_for_all_ranks_now_and_then_are_no_slow_rank() -> None:
    noise = random.Random(1)
    assert not found(4, lambda *_: noise.choice((0.1, 0.5)), steps=600)


def test_rank_that_alone_has_many_long_steps_is_slow() -> None:
    assert numbers(found(4, lambda rank, step: 0.5 if rank == 1 and step % 2 else 0.1, steps=400)) == [1]


@pytest.mark.parametrize(("every", "step_s"), [(100, 0.02), (50, 0.1), (10, 0.5)])
def test_rank_0_that_evaluates_now_and_then_is_not_slow(every: int, step_s: float) -> None:
    steps = max(STEPS, int(60 / step_s))
    assert not found(4, lambda rank, step: step_s + (3.0 if rank == 0 and step % every == 0 else 0.0), steps=steps)


def test_slow_loading_of_data_on_one_rank_is_found() -> None:
    assert numbers(found(3, lambda rank, _: 0.05 + (0.1 if rank == 2 else 0.0), steps=400)) == [2]


def test_nineteen_slow_steps_are_too_few() -> None:
    rounds = [(Window(1, 0.1, 0.3), Window(1, 0.4, 0.0))] * 19
    assert not slow_ranks(rounds, 1.5)
    assert numbers(slow_ranks([*rounds, rounds[0]], 1.5)) == [1]


def test_few_rounds_are_not_enough_however_many_steps_they_have() -> None:
    rounds = [(Window(500, 0.001, 0.001), Window(500, 0.002, 0.0))] * 4
    assert not slow_ranks(rounds, 1.5)
    assert numbers(slow_ranks([*rounds, rounds[0]], 1.5)) == [1]


def test_difference_that_does_not_matter_for_the_step_is_ignored() -> None:
    rounds = [(Window(10, 0.001, 0.1), Window(10, 0.003, 0.1))] * 10
    assert not slow_ranks(rounds, 1.5)


def test_factor_is_the_limit() -> None:
    assert not found(3, lambda rank, _: 0.28 if rank == 1 else 0.2)
    assert numbers(found(3, lambda rank, _: 0.28 if rank == 1 else 0.2, factor=1.3)) == [1]


def test_nothing_is_decided_before_each_rank_has_reported() -> None:
    comparison = SlowPolicy("warn", 1.5).comparison(2)
    assert comparison is not None
    for _ in range(100):
        comparison, slow = comparison.after(0, Window(10, 0.5, 0.0))
        assert not slow


def test_ranks_are_not_compared_if_that_is_off_or_there_is_one() -> None:
    assert SlowPolicy("off").comparison(4) is None
    assert SlowPolicy("warn").comparison(1) is None


@pytest.mark.parametrize("window", [(0, 1.0, 1.0), (5, float("nan"), 1.0), (5, -1.0, 0.0), (5, 1.0, float("inf"))])
def test_impossible_numbers_of_a_rank_are_not_valid(window: tuple[int, float, float]) -> None:
    assert not Window(*window).is_valid


@pytest.mark.parametrize(
    ("steps", "rounds", "kept"),
    [
        (4, 30, 5),  # 20 steps together
        (3, 30, 7),
        (20, 30, 5),
        (1, 30, 20),
        (1, 7, 7),
    ],
)
def test_last_rounds_with_20_steps_together_count(steps: int, rounds: int, kept: int) -> None:
    one = (Window(steps, 0.1, 0.0), Window(steps + 1, 0.1, 0.0))
    assert len(module._last_rounds((one,) * rounds)) == kept
