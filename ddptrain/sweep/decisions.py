"""Decides when a sweep starts a trial, and when it ends; without I/O or clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SAME_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Situation:
    """chosen: points so far, also of earlier drivers. waiting: trials of an earlier driver that are to be continued.

    capacity: trials that may run at the same time now. elapsed_s: of all drivers of the sweep together.
    """

    chosen: int
    waiting: int
    running: int
    capacity: int
    elapsed_s: float
    ending: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """The number of trials (None: no limit), and the time in seconds after which none begins (None: no limit)."""

    trials: int | None
    for_s: float | None

    def may_choose(self, now: Situation) -> bool:
        """Return whether another point may be chosen as soon as a trial can start."""
        if now.ending or (self.for_s is not None and now.elapsed_s >= self.for_s):
            return False
        return self.trials is None or now.chosen < self.trials

    def may_start(self, now: Situation) -> bool:
        """Return whether a trial may start now. A trial to be continued may start even after the time limit."""
        if now.ending or now.running >= max(1, now.capacity):
            return False
        return now.waiting > 0 or self.may_choose(now)

    def is_over(self, now: Situation) -> bool:
        """Return whether nothing runs, and nothing is to be started."""
        return now.running == 0 and (now.ending or (now.waiting == 0 and not self.may_choose(now)))


@dataclass(slots=True)
class Failures:
    """Counts the failures of trials by their root cause."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, cause: str) -> bool:
        """Count a failure; return whether the sweep must end because the same failure has happened too often."""
        self.counts[cause] += 1
        return self.counts[cause] >= SAME_FAILURES


def remaining_s(durations: list[float], left: int | None, parallel: int) -> float | None:
    """Return how long `left` trials will take, from the durations of earlier ones; None if that is not known."""
    if left is None or not durations:
        return None
    return sum(durations) / len(durations) * left / max(1, parallel)
