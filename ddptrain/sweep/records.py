"""sweep.json: the state of a sweep, for people and for reports. Optuna's journal beside it is what --resume reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ddptrain.config.sections.sweeping import SweepConfig
from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results.lookup import parse_time
from ddptrain.results.run_record import as_json_data
from ddptrain.results.secure_files import read_bytes, write_file

SWEEP_JSON = "sweep.json"
_FORMAT = 1


class TrialState(StrEnum):
    """The state of a trial; `interrupted`: its driver has ended, and --resume continues it."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    INTERRUPTED = "interrupted"

    @property
    def is_final(self) -> bool:
        """Whether the trial has a result."""
        return self in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED)


@dataclass(slots=True)
class TrialRecord:
    """One trial. value: the mean of `values`, or the last value of a trial without a result."""

    number: int
    params: dict[str, Any]
    state: TrialState = TrialState.RUNNING
    value: float | None = None
    values: list[float] = field(default_factory=list)
    spread: float | None = None
    step: int | None = None
    error: str = ""
    run_ids: list[str] = field(default_factory=list)
    started_at: str = ""
    ended_at: str | None = None
    duration_s: float | None = None

    @property
    def cause(self) -> str:
        """The failure without the names of the trial's own runs, which paths in it contain."""
        cause = self.error
        for run_id in self.run_ids:
            cause = cause.replace(run_id, "RUN")
        return cause


@dataclass(slots=True)
class SweepRecord:
    """A sweep: the content of sweep.json, whose fields have these names."""

    sweep_id: str
    name: str
    source: str  # the configuration file
    started_at: str
    metric: str = "val/loss"
    mode: str = "min"
    search: str = "tpe"
    prune: str = "none"
    seeds: int = 1
    ranks: int = 1
    parallel: int = 0  # most trials that ran at the same time so far
    planned: int | None = None
    for_s: float | None = None
    space: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: str = "running"
    exit_code: int | None = None
    message: str = ""
    ended_at: str | None = None
    duration_s: float | None = None
    best: int | None = None
    importance: dict[str, float] | None = None
    trials: list[TrialRecord] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """The number of trials that have ended."""
        return sum(trial.state.is_final for trial in self.trials)

    def find_best(self) -> TrialRecord | None:
        """Return the best trial that is complete; of equal ones the first."""
        complete = [trial for trial in self.trials if trial.state is TrialState.COMPLETE and trial.value is not None]
        sign = 1 if self.mode == "min" else -1
        return min(complete, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def save(self, folder: Path) -> None:
        """Replace sweep.json. Raises ResultsError."""
        data = as_json_data({"format": _FORMAT, **dataclasses.asdict(self)})
        write_file(folder / SWEEP_JSON, (json.dumps(data, allow_nan=False) + "\n").encode())


def newest_first(sweeps: Mapping[str, SweepRecord]) -> dict[str, SweepRecord]:
    """Return the sweeps by id, the newest first."""
    return dict(sorted(sweeps.items(), key=lambda item: (str(parse_time(item[1].started_at)), item[0]), reverse=True))


def choose_sweep(sweeps: Mapping[str, SweepRecord], where: str, name: str | None, sweep_id: str | None) -> str:
    """Return the id of a sweep: that one, or the first in `found` (of that name). Raises RunNotFound."""
    if sweep_id is not None:
        if sweep_id in sweeps:
            return sweep_id
        match = nearest(sweep_id, list(sweeps))
        hint = f"; did you mean {match}?" if match else ""
        raise RunNotFound(f'no sweep "{shorten(sweep_id)}" in {where}{hint}')
    for listed_id, record in sweeps.items():
        if name in (None, record.name):
            return listed_id
    raise RunNotFound(f"there is no sweep{f' named {name}' if name else ''} in {where} to resume")


def describe_space(sweep: SweepConfig) -> dict[str, dict[str, Any]]:
    """Return the search space for sweep.json."""
    found: dict[str, dict[str, Any]] = {}
    for name, space in sweep.space.items():
        if isinstance(space, list):
            found[name] = {"kind": "choice", "values": space}
            continue
        low, high = space.limits
        found[name] = {"kind": space.kind, "low": low, "high": high}
        if space.step is not None:
            found[name]["step"] = space.step
    return found


def read_sweep(folder: Path) -> SweepRecord:
    """Return the record of a sweep. Raises UsageError if sweep.json is missing or not valid."""
    path = folder / SWEEP_JSON
    try:
        return parse_sweep(read_bytes(path), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def parse_sweep(data: bytes, where: str) -> SweepRecord:
    """Return the record with that content of sweep.json, which is in `where`. Raises UsageError if it is not valid."""
    try:
        raw = json.loads(data)
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']!r} is not known")
        return TypeAdapter(SweepRecord).validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UsageError(f"cannot read {where}: it is not a sweep of this version ({shorten(why)})") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"cannot read {where}: it is not a sweep of this version ({error})") from error
