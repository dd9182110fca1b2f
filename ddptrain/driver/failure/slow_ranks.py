"""Finds the rank for which the other ranks wait, from what DDP has measured in single steps of each rank.

All ranks of DDP end a step together, so a slow rank waits least. It is named if the others wait for it for a fifth of
each step. A wait that only some steps have is not one: the second shortest wait of the others in their last steps is
compared with the second longest one of the slow rank.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from ddptrain.protocol.events import StepTimes

STEPS = 5  # of each rank
_MIN_SHARE = 0.2  # of a step
_LONGER = 1.1  # times the median of the other ranks


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A slow rank: seconds of its own work in a step, and the median of the other ranks.

    computes: its forward and backward passes take longer, too.
    """

    rank: int
    own_s: float
    others_s: float
    computes: bool


class SlowRanks:
    """The last measured steps of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._steps: list[deque[StepTimes]] = [deque(maxlen=STEPS) for _ in range(world_size)]

    def after(self, rank: int, step: StepTimes) -> SlowRank | None:
        """Return the slow rank after another step of a rank; None if there is none."""
        self._steps[rank].append(step)
        if any(len(steps) < STEPS for steps in self._steps):
            return None
        waits = [sorted(step.waited_s for step in steps) for steps in self._steps]
        slow = min(range(len(waits)), key=lambda each: median(waits[each]))
        others = [each for each in range(len(waits)) if each != slow]
        waited_s = median(waits[each][1] for each in others) - waits[slow][-2]
        if waited_s < _MIN_SHARE * median(step.step_s for step in self._steps[slow]):
            return None
        own = [median(step.step_s - step.waited_s for step in steps) for steps in self._steps]
        compute = [median(step.compute_s for step in steps) for steps in self._steps]
        computes = compute[slow] > _LONGER * median(compute[each] for each in others)
        return SlowRank(slow, own[slow], median(own[each] for each in others), computes)
