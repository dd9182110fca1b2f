"""The trials of a sweep, for a table and a plot with parallel axes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.results.metrics import finite_number
from ddptrain.results.sweep_record import SweepRecord, TrialRecord

_MOST_TRIALS = 2000
_MOST_PARAMS = 20
_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Axis:
    """A parameter of the search space. scale: linear, log, or choice with `values` in their order."""

    name: str
    scale: str
    values: Sequence[str]
    importance: float | None

    def value(self, trial: TrialRecord) -> float | str | None:
        """Return the value of a trial: a number, a text, or None."""
        if self.name not in trial.params:
            return None
        value = trial.params[self.name]
        number = finite_number(value)
        return number if number is not None else _text(value)


@dataclass(frozen=True, slots=True)
class SweepTable:
    """What the page shows of a sweep. hidden: trials that are left out."""

    record: SweepRecord
    axes: Sequence[Axis]
    trials: Sequence[TrialRecord]
    hidden: int

    @classmethod
    def of(cls, record: SweepRecord) -> SweepTable:
        """Return the table of a sweep."""
        importance = record.importance or {}
        names = list(record.space)[:_MOST_PARAMS]
        axes = [_axis(name, record.space[name], finite_number(importance.get(name))) for name in names]
        return cls(record, axes, record.trials[:_MOST_TRIALS], max(0, len(record.trials) - _MOST_TRIALS))

    def ranked(self) -> list[TrialRecord]:
        """Return the trials with a value, the best first; complete ones come before the others."""
        sign = -1.0 if self.record.mode == "max" else 1.0
        known = [trial for trial in self.trials if finite_number(trial.value) is not None]
        return sorted(known, key=lambda trial: (trial.state != "complete", sign * (trial.value or 0.0)))

    def for_script(self) -> dict[str, Any]:
        """Return the data of the plot."""
        return {
            "metric": self.record.metric or "value",
            "best": self.record.best,
            "ranked": [trial.number for trial in self.ranked()],
            "axes": [
                {
                    "name": axis.name[:_CHARACTERS],
                    "scale": axis.scale,
                    "values": axis.values,
                    "importance": axis.importance,
                }
                for axis in self.axes
            ],
            "trials": [
                {
                    "number": trial.number,
                    "state": trial.state,
                    "params": [_place(axis, trial) for axis in self.axes],
                    "value": finite_number(trial.value),
                }
                for trial in self.trials
            ],
        }


def _axis(name: str, space: Mapping[str, Any], importance: float | None) -> Axis:
    kind, choices = space.get("kind"), space.get("values")
    if kind == "choice":
        values = [_text(value) for value in choices[:_MOST_TRIALS]] if isinstance(choices, list) else []
        return Axis(name, "choice", values, importance)
    return Axis(name, "log" if kind in ("log", "log_int") else "linear", (), importance)


def _place(axis: Axis, trial: TrialRecord) -> float | str | None:
    """Return a value for the plot: one of the axis' values, or a number."""
    value = axis.value(trial)
    return _text(value) if axis.scale == "choice" and value is not None else value


def _text(value: Any) -> str:
    number = finite_number(value)
    if number is not None:
        return f"{number:.12g}"
    return (value if isinstance(value, str) else json.dumps(value))[:_CHARACTERS]
