"""The best values of a W&B run's metrics over all attempts that count: wandb itself knows those of one, or of all."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Best:
    """The best value of a metric (`goal` says what that is, "min" or "max") and the last one."""

    goal: str
    value: float
    last: float

    def take(self, value: float) -> None:
        """Another value of the metric."""
        self.last = value
        if math.isnan(self.value) or (value < self.value if self.goal == "min" else value > self.value):
            self.value = value


class Bests:
    """By the name of the metric."""

    def __init__(self) -> None:
        self._bests: dict[str, Best] = {}

    def note(self, name: str, goal: str, *values: float) -> None:
        """Values of a metric that count."""
        for value in values:
            self._bests.setdefault(name, Best(goal, value, value)).take(value)

    def summary(self) -> dict[str, dict[str, float]]:
        """As the summary of the run has them."""
        return {name: {best.goal: best.value, "last": best.last} for name, best in self._bests.items()}
