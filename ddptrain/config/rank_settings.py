"""Settings that the configuration checks and that workers and ranks use; they start without pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOST_AFTER_S = 60.0  # the default of failure.lost_after_s: a worker or scheduler that is silent for longer is lost
MAX_PROFILED_STEPS = 100  # the trace of more steps is too large for memory and for viewers


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The steps `first` to `last`, counted from 1, that torch.profiler records on `ranks`; () is every rank."""

    first: int
    last: int
    ranks: tuple[int, ...] = ()

    @property
    def problem(self) -> tuple[str, str] | None:
        """What is wrong with the steps, and what to do; None if they are possible."""
        if self.first < 1:
            return f"the first step is {self.first}", "steps count from 1"
        if self.last < self.first:
            return f"the first step is {self.first}, the last {self.last}", "write the lower one first"
        if (count := self.last - self.first + 1) > MAX_PROFILED_STEPS:
            return f"are {count} steps, of which the trace is too large", f"choose at most {MAX_PROFILED_STEPS} steps"
        return None

    @property
    def speaker(self) -> int:
        """The rank that reports the profile to the user."""
        return min(self.ranks, default=0)

    def includes(self, rank: int) -> bool:
        """Return whether the profile includes a rank."""
        return not self.ranks or rank in self.ranks

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class TrackerSpec:
    """A tracker of a rank; `from_driver`: settings that the driver adds (for W&B the run's id, the mode, ...)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    finish_timeout_s: float = 30.0
    from_driver: Mapping[str, Any] = field(default_factory=dict)
