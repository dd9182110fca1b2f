"""Selects the numbers for W&B, and groups them into one row for each step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEP = "step"
EPOCH = "epoch"
ATTEMPT = "attempt"  # after a restart W&B keeps both rows of a repeated step; the higher attempt counts


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that was not logged yet, and its position."""

    value: float
    step: float
    epoch: float | None
    time_s: float


class RowFilter:
    """Selects one value of a metric in `every` steps, and at the end the last value that was not selected.

    All values of a metric that is not logged at every step are selected, and the first value of each whole epoch. So
    metrics that are logged once per epoch are complete, even if an epoch has few steps.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._step: float | None = None
        self._tick = 0  # the number of steps at which anything was logged
        self._last_tick: dict[str, int] = {}  # name -> tick of its last value
        self._epochs: dict[str, float] = {}  # name -> whole epoch of its last value that had one
        self._sent: dict[str, float] = {}  # name -> step of the last value that was selected
        self._held: dict[str, HeldValue] = {}

    def take(self, values: Mapping[str, float], step: float | None, epoch: float | None, time_s: float) -> list[str]:
        """Return the names of the values to log now; all names if there is no step."""
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
                self._held[name] = HeldValue(value, step, epoch, time_s)
            self._last_tick[name] = self._tick
        return due

    def _begins_epoch(self, name: str, epoch: float | None) -> bool:
        if epoch is None or not float(epoch).is_integer() or epoch == self._epochs.get(name):
            return False
        self._epochs[name] = epoch
        return True

    def _is_due(self, name: str, step: float) -> bool:
        sent = self._sent.get(name)
        if sent is None or not 0 <= step - sent < self._every:  # steps may start again from a lower number
            return True
        return step != sent and self._tick - self._last_tick[name] > 1

    def rest(self) -> dict[float, dict[str, HeldValue]]:
        """Return the values that were not logged, by step, and forget them."""
        rows: dict[float, dict[str, HeldValue]] = {}
        for name, held in self._held.items():
            rows.setdefault(held.step, {})[name] = held
        self._held = {}
        return dict(sorted(rows.items()))


@dataclass(slots=True)
class WandbRow:
    """The values of one step, collected before they are logged. `since_s` is when it was created (monotonic)."""

    step: float | None
    values: dict[str, Any] = field(default_factory=dict)
    epoch: float | None = None
    time_s: float = 0.0
    since_s: float = field(default_factory=time.monotonic)

    def fits(self, step: float | None, values: Mapping[str, Any]) -> bool:
        """Return whether these values belong to the row: they have its step, and none of its names."""
        return step is not None and step == self.step and not self.values.keys() & values.keys()

    def add(self, values: Mapping[str, Any], epoch: float | None, time_s: float) -> None:
        """Add values, which have the row's step."""
        self.values |= values
        self.epoch = self.epoch if epoch is None else epoch
        self.time_s = max(self.time_s, time_s)

    def as_logged(self, prefix: str, attempt: int) -> dict[str, Any]:
        """Return the row for wandb.Run.log, with `prefix` before each name."""
        row: dict[str, Any] = {f"{prefix}{name}": value for name, value in self.values.items()}
        for name, value in ((STEP, self.step), (EPOCH, self.epoch), (ATTEMPT, attempt)):
            if value is not None:
                row.setdefault(f"{prefix}{name}", value)
        return {**row, "_timestamp": self.time_s}
