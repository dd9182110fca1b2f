"""What both the configuration and workers and ranks use, which start without pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOST_AFTER_S = 60.0  # the default of failure.lost_after_s: a worker or scheduler that is silent for longer is lost
MAX_PROFILED_STEPS = 100  # the trace of more steps is too large for memory and for viewers
_LOWER_IS_BETTER = frozenset({"loss", "error", "perplexity", "mae", "mse", "rmse"})
_HIGHER_IS_BETTER = frozenset(
    {"acc", "accuracy", "auc", "auroc", "bleu", "correct", "f1", "iou", "map", "precision", "recall", "reward"}
    | {"rouge", "score", "top1", "top5"}
)


def goal_of(name: str, metric: str = "", mode: str = "min") -> str:
    """Return "min" or "max", the best value of a metric; "" if its name does not say it.

    `metric` and `mode` are those of the configuration's section `checkpoint`.
    """
    if name == metric:
        return mode
    for part in reversed(name.lower().split("/")):  # val/accuracy, accuracy/val
        words = set(part.replace("-", "_").split("_"))
        if words & _LOWER_IS_BETTER or part.endswith(tuple(_LOWER_IS_BETTER)):
            return "min"
        if (words | {word.rstrip("@0123456789") for word in words}) & _HIGHER_IS_BETTER:  # acc1, map@50
            return "max"
    return ""


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
