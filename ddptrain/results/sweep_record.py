"""A sweep is a run directory whose run.json has the kind `sweep`; its trials are runs below it.

sweep.json beside run.json has the search and its trials: what --resume continues, and what reports show.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ddptrain.config.sections.sweeping import SweepConfig
from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results.layout import valid_run_id
from ddptrain.results.run import Run, parse_time
from ddptrain.results.run_record import SWEEP, RunStatus, as_json_data
from ddptrain.results.runs import Runs, open_runs_dir
from ddptrain.results.secure_files import read_bytes, write_file
from ddptrain.storage.store import is_url

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
    """One trial. value: the best value of the metric, or the last one of a trial without a result.

    run_ids: its run; sweeps of earlier versions repeated a trial, with a `spread`.
    """

    number: int
    params: dict[str, Any]
    state: TrialState = TrialState.RUNNING
    value: float | None = None
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
    importance: dict[str, float] | None = None  # of the fields; in sweeps of earlier versions
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

    def interrupt(self) -> None:
        """Set the status, and that of trials without a result: the driver has ended."""
        self.status = "interrupted"
        for trial in self.trials:
            if trial.state is TrialState.RUNNING:
                trial.state = TrialState.INTERRUPTED

    def save(self, folder: Path) -> None:
        """Replace sweep.json. Raises ResultsError."""
        data = as_json_data({"format": _FORMAT, **dataclasses.asdict(self)})
        write_file(folder / SWEEP_JSON, (json.dumps(data, allow_nan=False) + "\n").encode())


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


@dataclass(frozen=True, slots=True)
class FoundSweep:
    """A sweep, its folder or URL, and its trials."""

    record: SweepRecord
    where: str
    trials: Runs


def find_sweep(runs_dir: str, name: str) -> FoundSweep | None:
    """Return the sweep of that name, path or URL; None if there is none. Raises UsageError, StoreError."""
    if is_url(name) or "/" in name:
        runs_dir, _, name = name.rstrip("/").rpartition("/")
    if not valid_run_id(name):
        return None
    runs = open_runs_dir(runs_dir or "/")
    view = runs.get(name)
    return _found(runs, view) if view is not None and view.is_sweep else None


def list_sweeps(runs_dir: str) -> list[FoundSweep]:
    """Return the sweeps of this user that can be read, the newest first. Raises UsageError, StoreError."""
    runs, sweeps = open_runs_dir(runs_dir), []
    for view in runs.list(SWEEP):
        with suppress(UsageError):
            if not view.why_foreign():
                sweeps.append(_found(runs, view))
    return sorted(sweeps, key=lambda found: (str(parse_time(found.record.started_at)), found.where), reverse=True)


def _found(runs: Runs, view: Run) -> FoundSweep:
    view.file(SWEEP_JSON)
    record = read_sweep(view.root)
    if record.status == RunStatus.RUNNING and not view.is_running:
        record.interrupt()
    return FoundSweep(record, view.where, runs.inside(view.root.name))


def choose_sweep(runs_dir: str, name: str | None, sweep_id: str | None) -> str:
    """Return the id of a sweep: that one, or the newest (of that name). Raises RunNotFound, UsageError, StoreError."""
    if sweep_id is not None and valid_run_id(sweep_id) and find_sweep(runs_dir, sweep_id) is not None:
        return sweep_id
    records = [found.record for found in list_sweeps(runs_dir)]
    if sweep_id is not None:
        match = nearest(sweep_id, [record.sweep_id for record in records])
        hint = f"; did you mean {match}?" if match else ""
        raise RunNotFound(f'no sweep "{shorten(sweep_id)}" in {runs_dir}{hint}')
    for record in records:
        if name in (None, record.name):
            return record.sweep_id
    raise RunNotFound(f"there is no sweep{f' named {name}' if name else ''} in {runs_dir} to resume")


def read_sweep(folder: Path) -> SweepRecord:
    """Return the record of a sweep. Raises UsageError if sweep.json is missing or not valid."""
    path = folder / SWEEP_JSON
    try:
        raw = json.loads(read_bytes(path))
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']!r} is not known")
        return TypeAdapter(SweepRecord).validate_python(raw)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            why = shorten(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        raise UsageError(f"cannot read {path}: it is not a sweep of this version ({why})") from None
