"""Reads sweep.json: the trials of a sweep, for a table and a plot with parallel axes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import UsageError
from ddptrain.results import ownership
from ddptrain.results.layout import valid_run_id
from ddptrain.results.metrics import finite_number, is_number
from ddptrain.results.secure_files import read_bytes

SWEEP_JSON, _LOCK = "sweep.json", "sweep.lock"
_MOST_TRIALS = 2000
_MOST_PARAMS = 20
_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Axis:
    """A parameter of the search space. scale: linear, log, or choice with `values` in their order."""

    name: str
    scale: str
    values: Sequence[str] = ()
    importance: float | None = None

    def place(self, value: float | str | None) -> float | str | None:
        """Return a value for the plot: one of `values`, or a number."""
        return value if value is None or self.scale != "choice" else _text(value)


@dataclass(frozen=True, slots=True)
class Trial:
    """One point; `params` has a value for each axis: a number, a text, or None. `value`: of the metric, or None."""

    number: int
    state: str
    params: Sequence[float | str | None]
    value: float | None
    spread: float | None
    step: int | None
    duration_s: float | None
    error: str
    run_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep; `best` is the number of the best trial. hidden: trials that are left out."""

    folder: Path
    name: str
    status: str
    message: str
    metric: str
    mode: str
    search: str
    prune: str
    started_at: str
    duration_s: float | None
    planned: int | None
    best: int | None
    axes: Sequence[Axis]
    trials: Sequence[Trial]
    hidden: int = 0

    @property
    def is_running(self) -> bool:
        """Whether its driver says that it is running."""
        return self.status == "running"

    def ranked(self) -> list[Trial]:
        """Return the trials with a value, the best first; complete ones come before the others."""
        sign = -1.0 if self.mode == "max" else 1.0
        known = [trial for trial in self.trials if trial.value is not None]
        return sorted(known, key=lambda trial: (trial.state != "complete", sign * (trial.value or 0.0)))


def is_sweep(folder: Path) -> bool:
    """Return whether the folder is that of a sweep."""
    try:
        return (folder / SWEEP_JSON).is_file()
    except (OSError, ValueError):
        return False


def read_sweep(folder: Path) -> Sweep:
    """Read the folder of a sweep; fields of other types are left out.

    Raises UsageError if sweep.json cannot be read.
    """
    path, lock = folder / SWEEP_JSON, folder / _LOCK  # no lock is in a copy of a sweep in a store
    is_free = lock.is_file() and ownership.is_held(lock) is False  # before the driver's last record
    try:
        raw = json.loads(read_bytes(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read {path}: it is not JSON; the folder is not that of a sweep, or damaged"
        ) from error
    if not isinstance(raw, dict):
        raise UsageError(f"cannot read {path}: it is not a JSON object; the folder is not that of a sweep, or damaged")
    is_killed = is_free and raw.get("status") == "running"
    found = [trial for trial in _list(raw.get("trials")) if isinstance(trial, dict)]
    names = list(_mapping(raw.get("space")))[:_MOST_PARAMS]
    importance = _mapping(raw.get("importance"))
    axes = [_axis(name, _mapping(raw["space"][name]), finite_number(importance.get(name))) for name in names]
    return Sweep(
        folder=folder,
        name=_text(raw.get("sweep_id")) or folder.name,
        status="interrupted" if is_killed else _text(raw.get("status")),
        message=_text(raw.get("message"), 1000),
        metric=_text(raw.get("metric")),
        mode=_text(raw.get("mode")),
        search=_text(raw.get("search")),
        prune=_text(raw.get("prune")),
        started_at=_text(raw.get("started_at")),
        duration_s=finite_number(raw.get("duration_s")),
        planned=_whole(raw.get("planned")),
        best=_whole(raw.get("best")),
        axes=axes,
        trials=[_trial(trial, names, is_killed=is_killed) for trial in found[:_MOST_TRIALS]],
        hidden=max(0, len(found) - _MOST_TRIALS),
    )


def _axis(name: str, space: Mapping[str, Any], importance: float | None) -> Axis:
    kind = space.get("kind")
    if kind == "choice":
        values = [_text(_param(value)) for value in _list(space.get("values"))[:_MOST_TRIALS]]
        return Axis(name[:_CHARACTERS], "choice", values, importance)
    return Axis(name[:_CHARACTERS], "log" if kind in ("log", "log_int") else "linear", (), importance)


def _trial(raw: Mapping[str, Any], names: Sequence[str], *, is_killed: bool) -> Trial:
    params = _mapping(raw.get("params"))
    return Trial(
        number=_whole(raw.get("number")) or 0,
        state="interrupted" if is_killed and raw.get("state") == "running" else _text(raw.get("state")),
        params=[_param(params[name]) if name in params else None for name in names],
        value=finite_number(raw.get("value")),
        spread=finite_number(raw.get("spread")),
        step=_whole(raw.get("step")),
        duration_s=finite_number(raw.get("duration_s")),
        error=_text(raw.get("error"), 300),
        run_ids=[name for name in _list(raw.get("run_ids")) if isinstance(name, str) and valid_run_id(name)][:20],
    )


def _param(value: Any) -> float | str:
    number = finite_number(value)
    return number if number is not None else _text(value if isinstance(value, str) else json.dumps(value))


def _text(value: Any, most: int = _CHARACTERS) -> str:
    if is_number(value):
        return f"{value:.12g}"
    return value[:most] if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
