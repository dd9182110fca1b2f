"""Finds ranks that are slower than other ranks, from their own times in each training step.

With DDP all ranks make each step together, so that their steps have equal durations. The own times differ: a slow rank
works while other ranks wait for it. A rank is slow if, in the last MIN_STEPS steps and MIN_ROUNDS rounds,

- its mean own time is `factor` times the median of all ranks (the lower median: of two ranks, that of the faster one),
- this was so in at least MIN_SLOW_SHARE of the rounds: occasional additional work does not make a rank slow,
- the difference is at least MIN_STEP_SHARE of the step: otherwise other ranks do not wait long for this rank.

A round is complete when each rank has sent at least one window of about a second (see rank/steps/step_window.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

MIN_STEPS = 20
MIN_ROUNDS = 5
MIN_SLOW_SHARE = 0.8
MIN_STEP_SHARE = 0.1
_MAX_ROUNDS = MIN_STEPS  # each round has at least one step


class Window(NamedTuple):
    """Steps of one rank, and its mean own time and wait in each of them, in seconds."""

    steps: int
    own_s: float
    waited_s: float

    @property
    def is_valid(self) -> bool:
        """Whether the numbers are possible, because ranks are not trusted."""
        times = (self.own_s, self.waited_s)
        return self.steps > 0 and all(math.isfinite(time) and time >= 0.0 for time in times)

    def plus(self, other: Window) -> Window:
        """Both windows as one."""
        steps = self.steps + other.steps
        own_s = (self.own_s * self.steps + other.own_s * other.steps) / steps
        return Window(steps, own_s, (self.waited_s * self.steps + other.waited_s * other.steps) / steps)


Round = tuple[Window, ...]  # the window of each rank


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slow: own time and wait in each of its last `steps` steps, and the median of all own times."""

    rank: int
    steps: int
    own_s: float
    waited_s: float
    median_s: float


class StepComparison(NamedTuple):
    """The steps of all ranks. A named tuple is fast to replace, which each window does.

    latest: the windows of the current round, by rank. rounds: the last complete rounds. reported: ranks that were
    already reported as slow.
    """

    factor: float
    latest: tuple[Window | None, ...]
    rounds: tuple[Round, ...] = ()
    reported: frozenset[int] = frozenset()

    def after(self, rank: int, window: Window) -> tuple[StepComparison, tuple[SlowRank, ...]]:
        """Return the next state after a window of a rank, and the ranks that are newly found to be slow."""
        before = self.latest[rank]
        latest = (*self.latest[:rank], before.plus(window) if before else window, *self.latest[rank + 1 :])
        complete = tuple(each for each in latest if each is not None)
        if len(complete) < len(latest):
            return self._replace(latest=latest), ()
        rounds = _last_rounds((*self.rounds, complete))
        new = tuple(slow for slow in slow_ranks(rounds, self.factor) if slow.rank not in self.reported)
        reported = self.reported | {slow.rank for slow in new}
        return self._replace(latest=(None,) * len(latest), rounds=rounds, reported=reported), new


@dataclass(frozen=True, slots=True)
class SlowPolicy:
    """failure.slow and failure.slow_factor."""

    action: str = "off"
    factor: float = 1.5

    def comparison(self, world_size: int) -> StepComparison | None:
        """Return the state before the first window; None if ranks are not compared."""
        return StepComparison(self.factor, (None,) * world_size) if self.action != "off" and world_size > 1 else None


def slow_ranks(rounds: Sequence[Round], factor: float) -> list[SlowRank]:
    """Return the ranks that were slow in these rounds; none if they have too few steps."""
    if len(rounds) < MIN_ROUNDS or _steps(rounds) < MIN_STEPS:
        return []
    slow_ones = []
    medians = [median_low(window.own_s for window in one) for one in rounds]
    for rank in range(len(rounds[0])):
        windows = [one[rank] for one in rounds]
        total = functools.reduce(Window.plus, windows)
        median_s = sum(middle * window.steps for middle, window in zip(medians, windows, strict=True)) / total.steps
        slow = SlowRank(rank, total.steps, total.own_s, total.waited_s, median_s)
        slow_rounds = sum(window.own_s > factor * middle for window, middle in zip(windows, medians, strict=True))
        matters = slow.own_s - median_s >= MIN_STEP_SHARE * (slow.own_s + slow.waited_s)
        if slow.own_s > factor * median_s and slow_rounds >= MIN_SLOW_SHARE * len(rounds) and matters:
            slow_ones.append(slow)
    return slow_ones


def _steps(rounds: Sequence[Round]) -> int:
    return sum(min(window.steps for window in one) for one in rounds)


def _last_rounds(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    """Return the last rounds that have enough steps together."""
    for count in range(MIN_ROUNDS, _MAX_ROUNDS + 1):
        if _steps(rounds[-count:]) >= MIN_STEPS:
            return rounds[-count:]
    return rounds[-_MAX_ROUNDS:]
