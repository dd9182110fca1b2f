"""Which numbers go to W&B, and in which rows: thinned by step, and together where they belong to one step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEP = "step"
EPOCH = "epoch"
ATTEMPT = "attempt"  # tells the rows of the attempt that counts from those that it repeats
_LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse")
_HIGHER_IS_BETTER = ("accuracy", "acc", "top1", "top5", "f1", "auc", "precision", "recall", "score")


def goal_of(name: str, metric: str = "", mode: str = "min") -> str:
    """What is best of a metric, "min" or "max", or "" where nobody can say; `metric`, `mode`: the checkpoint's."""
    if name == metric:
        return mode
    last = name.lower().rpartition("/")[2]
    words = last.replace("-", "_").split("_")
    if any(word in words or last.endswith(word) for word in _LOWER_IS_BETTER):
        return "min"
    return "max" if any(word in words for word in _HIGHER_IS_BETTER) else ""


class Thinner:
    """Lets a name through when `every` steps are over since it was last let through, and what was held back at the end.

    A name that is not in every step that is logged always goes, and so does the first value of each whole epoch: what
    is logged once an epoch is whole, however few steps that has.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._step: float | None = None
        self._tick = 0  # counts the steps in which anything was logged
        self._seen: dict[str, int] = {}  # name -> the tick of its last value
        self._epochs: dict[str, float] = {}  # name -> the whole epoch of its last value that had one
        self._sent: dict[str, float] = {}  # name -> the step of the last value that went
        self._held: dict[str, Held] = {}

    def take(self, values: Mapping[str, float], step: float | None, epoch: float | None, time_s: float) -> list[str]:
        """The names of `values` that go now; without a step all do."""
        if step is None:
            return list(values)
        if step != self._step:
            self._step, self._tick = step, self._tick + 1
        due = []
        for name, value in values.items():
            if self._is_due(name, step) | self._begins_epoch(name, epoch):
                due.append(name)
                self._sent[name] = step
                self._held.pop(name, None)
            else:
                self._held[name] = Held(value, step, epoch, time_s)
            self._seen[name] = self._tick
        return due

    def _begins_epoch(self, name: str, epoch: float | None) -> bool:
        if epoch is None or not float(epoch).is_integer() or epoch == self._epochs.get(name):
            return False
        self._epochs[name] = epoch
        return True

    def _is_due(self, name: str, step: float) -> bool:
        sent = self._sent.get(name)
        if sent is None or not 0 <= step - sent < self._every:  # steps may begin again
            return True
        return step != sent and self._tick - self._seen[name] > 1

    def rest(self) -> dict[float, dict[str, Held]]:
        """By step, the last value of each name that was held back; they count as sent."""
        rows: dict[float, dict[str, Held]] = {}
        for name, held in self._held.items():
            rows.setdefault(held.step, {})[name] = held
        self._held = {}
        return dict(sorted(rows.items()))


@dataclass(frozen=True, slots=True)
class Held:
    """A value that was held back, and where it belongs."""

    value: float
    step: float
    epoch: float | None
    time_s: float


@dataclass(slots=True)
class Row:
    """What is logged at one step, until it goes; `since_s` is when it was begun (monotonic)."""

    step: float | None
    values: dict[str, Any] = field(default_factory=dict)
    epoch: float | None = None
    time_s: float = 0.0
    since_s: float = field(default_factory=time.monotonic)

    def fits(self, step: float | None, names: Mapping[str, Any]) -> bool:
        """Whether values of that step can join: of the same one, and none of them again."""
        return step is not None and step == self.step and not self.values.keys() & names.keys()

    def add(self, values: Mapping[str, Any], epoch: float | None, time_s: float) -> None:
        """Take more values of the step."""
        self.values |= values
        self.epoch = self.epoch if epoch is None else epoch
        self.time_s = max(self.time_s, time_s)

    def as_logged(self, prefix: str, attempt: int) -> dict[str, Any]:
        """The row as W&B gets it, every name behind `prefix`."""
        row: dict[str, Any] = {f"{prefix}{name}": value for name, value in self.values.items()}
        for name, value in ((STEP, self.step), (EPOCH, self.epoch), (ATTEMPT, attempt)):
            if value is not None:
                row.setdefault(f"{prefix}{name}", value)
        return {**row, "_timestamp": self.time_s}
