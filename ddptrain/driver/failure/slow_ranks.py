"""Finds ranks that are slower than the others by themselves, from their own times in each training step.

Ranks of DDP step together, so that all of them look equally slow. What differs is the own time: a slow rank works while
the others wait for it. A rank is slow if, in the last MIN_STEPS steps and MIN_ROUNDS rounds,

- its mean own time is `factor` times the median of all ranks (the lower median: of two ranks, that of the faster one),
- that was so in at least MOST_ROUNDS of the rounds: something that a rank does now and then does not make it slow,
- the difference is at least LEAST_SHARE of the step: otherwise nobody waits long for the rank.

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
MOST_ROUNDS = 0.8
LEAST_SHARE = 0.1
_MOST_KEPT = MIN_STEPS  # rounds: one of them has at least one step


class Window(NamedTuple):
    """Steps of one rank, and its mean own time and wait in each of them, in seconds."""

    steps: int
    own_s: float
    waited_s: float

    @property
    def is_valid(self) -> bool:
        """Whether the numbers can be right: they come from a rank, which is not trusted."""
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
    """What is known of the steps of all ranks; a named tuple, because each window replaces it.

    latest: the windows of the round under way, by rank. rounds: the last complete ones. reported: ranks that are known
    to be slow; each is reported once.
    """

    factor: float
    latest: tuple[Window | None, ...]
    rounds: tuple[Round, ...] = ()
    reported: frozenset[int] = frozenset()

    def after(self, rank: int, window: Window) -> tuple[StepComparison, tuple[SlowRank, ...]]:
        """The next state, and the ranks that are slow from now on."""
        before = self.latest[rank]
        latest = (*self.latest[:rank], before.plus(window) if before else window, *self.latest[rank + 1 :])
        complete = tuple(each for each in latest if each is not None)
        if len(complete) < len(latest):
            return self._replace(latest=latest), ()
        rounds = _last_rounds((*self.rounds, complete))
        found = tuple(slow for slow in slow_ranks(rounds, self.factor) if slow.rank not in self.reported)
        reported = self.reported | {slow.rank for slow in found}
        return self._replace(latest=(None,) * len(latest), rounds=rounds, reported=reported), found


@dataclass(frozen=True, slots=True)
class SlowPolicy:
    """failure.slow and failure.slow_factor."""

    action: str = "off"
    factor: float = 1.5

    def comparison(self, world_size: int) -> StepComparison | None:
        """The state before the first window; None if ranks are not compared."""
        return StepComparison(self.factor, (None,) * world_size) if self.action != "off" and world_size > 1 else None


def slow_ranks(rounds: Sequence[Round], factor: float) -> list[SlowRank]:
    """The ranks that were slow in these rounds; none if they have too few steps."""
    if len(rounds) < MIN_ROUNDS or _steps(rounds) < MIN_STEPS:
        return []
    found = []
    medians = [median_low(window.own_s for window in one) for one in rounds]
    for rank in range(len(rounds[0])):
        windows = [one[rank] for one in rounds]
        total = functools.reduce(Window.plus, windows)
        median_s = sum(middle * window.steps for middle, window in zip(medians, windows, strict=True)) / total.steps
        slow = SlowRank(rank, total.steps, total.own_s, total.waited_s, median_s)
        is_often = sum(window.own_s > factor * middle for window, middle in zip(windows, medians, strict=True))
        matters = slow.own_s - median_s >= LEAST_SHARE * (slow.own_s + slow.waited_s)
        if slow.own_s > factor * median_s and is_often >= MOST_ROUNDS * len(rounds) and matters:
            found.append(slow)
    return found


def _steps(rounds: Sequence[Round]) -> int:
    return sum(min(window.steps for window in one) for one in rounds)


def _last_rounds(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    """The last rounds that have enough steps together."""
    for count in range(MIN_ROUNDS, _MOST_KEPT + 1):
        if _steps(rounds[-count:]) >= MIN_STEPS:
            return rounds[-count:]
    return rounds[-_MOST_KEPT:]
