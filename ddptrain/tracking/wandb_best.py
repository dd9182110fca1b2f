"""The best values of a W&B run's metrics, for the next attempt: offline, wandb knows only those of its own."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAVE_EVERY_S = 5.0


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
    """Kept in a file of the run's folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"best-rank-{rank}.json"
        self._bests: dict[str, Best] = {}
        self._before: dict[str, float] = {}
        self._saved_s = time.monotonic()
        with suppress(OSError, ValueError, TypeError, AttributeError):
            self._load(json.loads(self._file.read_text()))

    def _load(self, kept: Mapping[str, Any]) -> None:
        for name, (goal, value, last) in kept.items():
            self._bests[name] = Best(str(goal), float(value), float(last))
            self._before[name] = float(value)

    def note(self, name: str, goal: str, value: float) -> None:
        """A value of a metric was logged."""
        if name in self._bests:
            self._bests[name].take(value)
        else:
            self._bests[name] = Best(goal, value, value)
        if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            with suppress(OSError):
                self.save()

    def older(self) -> dict[str, dict[str, float]]:
        """As the summary has them, the metrics whose best value is of an earlier attempt."""
        return {
            name: {best.goal: best.value, "last": best.last}
            for name, best in self._bests.items()
            if self._before.get(name) == best.value
        }

    def save(self) -> None:
        """Write them down. Raises OSError."""
        self._saved_s = time.monotonic()
        beside = self._file.with_name(f".{self._file.name}.new")
        beside.write_text(json.dumps({name: (best.goal, best.value, best.last) for name, best in self._bests.items()}))
        os.replace(beside, self._file)
