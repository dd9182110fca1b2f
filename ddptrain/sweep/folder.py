"""Sweeps in a folder of this machine: a new one, or one to resume, with its lock."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.config.load import load_data
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import describe_value, shorten
from ddptrain.errors import DdptrainError, RunLocked, UsageError
from ddptrain.results import ownership
from ddptrain.results.errors import results_errors
from ddptrain.results.layout import RunLayout, check_run_id, new_run_id
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.results.run_store import LocalRuns
from ddptrain.results.secure_files import is_own_folder, read_bytes, require_own_folder
from ddptrain.storage.remote_folder import is_url
from ddptrain.sweep.metric import saved_values, values_of_run
from ddptrain.sweep.records import SWEEP_JSON, SweepRecord, choose_sweep, newest_first, read_sweep
from ddptrain.sweep.stored import StoredSweeps

JOURNAL, CONFIG, LOG = "journal.log", "config.yaml", "driver.log"
BEST, LOCK, SCRATCH = "best.yaml", "sweep.lock", ".scratch"
# What may differ when a sweep is resumed: how long it takes, and how many trials run at the same time.
_MAY_DIFFER = frozenset({"trials", "for", "parallel", "prune"})


def sweeps_in(runs: Path) -> dict[str, SweepRecord]:
    """Return the sweeps of this user in a folder that can be read, by id, the newest first."""
    sweeps: dict[str, SweepRecord] = {}
    folders: list[Path] = []
    with suppress(OSError):
        folders = [path for path in runs.iterdir() if (path / SWEEP_JSON).is_file() and is_own_folder(path)]
    for folder in folders:
        with suppress(UsageError):
            sweeps[folder.name] = read_sweep(folder)
    return newest_first(sweeps)


class LocalSweep:
    """One sweep in a folder, held by this process. stored.StoredSweep has the same methods."""

    def __init__(self, folder: Path) -> None:
        self.sweep_id, self.folder = folder.name, folder
        self.where = self.runs_dir = str(folder)
        self.journal = folder / JOURNAL

    def find_trial(self, run_id: str) -> RunView | None:
        """Return a trial's run; None if it has not begun."""
        layout = RunLayout(self.folder / run_id)
        return load_run(layout.root) if layout.run_json.is_file() else None

    def values(self, view: RunView, metric: str) -> dict[float, float]:
        """Return the values of the metric in a run, by step."""
        return values_of_run(view, metric, saved_values(view.layout, metric))

    def cut_journal(self) -> None:
        """Do nothing: nothing is uploaded."""

    def upload(self, within_s: float) -> str:
        """Do nothing; nothing is missing."""
        return ""

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Do nothing: there are no failures."""


@dataclass(frozen=True, slots=True)
class LocalSweeps:
    """The sweeps in a folder of runs. stored.StoredSweeps has the same methods."""

    runs: Path

    def find(self, name: str | None, sweep_id: str | None) -> str:
        """Return the id of a sweep: that one, or the newest (of that name). Raises RunNotFound."""
        return choose_sweep(sweeps_in(self.runs), str(self.runs), name, sweep_id)

    def list(self) -> dict[str, SweepRecord]:
        """Return the sweeps of this user by id, the newest first."""
        return sweeps_in(self.runs)

    def read(self, sweep_id: str) -> SweepRecord:
        """Return the record of a sweep. Raises UsageError."""
        return read_sweep(self.runs / sweep_id)

    def create(self, name: str, sweep_id: str | None) -> AbstractContextManager[LocalSweep]:
        """Begin a sweep, and hold its lock for the block. Raises UsageError, RunLocked, ResultsError."""
        if sweep_id is not None:
            check_run_id(sweep_id)
        folder = self.runs / (sweep_id or new_run_id(name))
        with results_errors(folder):
            self.runs.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir(mode=0o755)
            except FileExistsError:
                hint = "continue it with --resume" if (folder / SWEEP_JSON).exists() else "choose another --sweep-id"
                raise UsageError(f"{folder} exists already; {hint}") from None
        return self.resume(folder.name)

    @contextmanager
    def resume(self, sweep_id: str) -> Iterator[LocalSweep]:
        """Resume a sweep, and hold its lock for the block. Raises RunLocked, ResultsError."""
        folder = self.runs / sweep_id
        require_own_folder(folder)
        try:
            descriptor = ownership.take(folder / LOCK)
        except RunLocked:
            holder = ownership.holder(folder / LOCK) or "another process"
            raise RunLocked(
                f"sweep {sweep_id} is held by {holder}; wait for it, stop it with ddptrain stop {sweep_id}, or "
                "choose another --sweep-id"
            ) from None
        try:
            yield LocalSweep(folder)
        finally:
            os.close(descriptor)


def open_sweeps(results_dir: str) -> LocalSweeps | StoredSweeps:
    """Return the sweeps of a folder, or of an object store. Raises UsageError, StoreError."""
    runs = open_runs_dir(results_dir)
    if isinstance(runs, LocalRuns):
        return LocalSweeps(runs.folder.absolute())
    return StoredSweeps(runs)


def check_same(folder: Path, resolved: ResolvedConfig) -> None:
    """Raise UsageError, with the differences, if the configuration is not the one of the sweep to resume."""
    path = folder / CONFIG
    try:
        before = load_data(read_bytes(path), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; begin a new sweep") from error
    changes = list(_changes(_compared(before), _compared(resolved.recorded)))
    if changes:
        lines = "".join(f"\n  {change}" for change in changes[:20])
        raise UsageError(f"sweep {folder.name} has other settings; begin a new sweep, or undo the changes:{lines}")


def _compared(config: object) -> dict[str, Any]:
    data = config if isinstance(config, Mapping) else {}
    flat: dict[str, Any] = {"workload": data.get("workload")}
    for section in ("sweep", "params", "prepare"):
        fields = data.get(section)
        for name, value in fields.items() if isinstance(fields, Mapping) else ():
            if section != "sweep" or name not in _MAY_DIFFER:
                is_space = section == "sweep" and name == "space" and isinstance(value, Mapping)
                flat |= (
                    {f"sweep.space.{field}": of for field, of in value.items()}
                    if is_space
                    else {f"{section}.{name}": value}
                )
    if flat.get("sweep.ranks") is None and isinstance(cluster := data.get("cluster"), Mapping):  # as ranks_of does
        flat["sweep.ranks"] = cluster.get("ranks") if isinstance(cluster.get("ranks"), int) else 1
    return flat


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield f"{name}: was {_shown(before.get(name))}, is {_shown(now.get(name))}"


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, Mapping):  # the options that are not given are null
        options = {name: option for name, option in value.items() if option is not None}
        return shorten(json.dumps(options)) if options else ", ".join(value)
    return shorten(json.dumps(value)) if isinstance(value, list) else describe_value(value)


def last_source(runs_dir: str, sweep_id: str | None) -> str:
    """Return the configuration file of the sweep to resume, for a command that names none. Raises UsageError."""
    if is_url(runs_dir):  # whoever can write to the store could name a file of theirs, whose code would run
        raise UsageError(f"name the configuration: ddptrain sweep CONFIG --resume; that in {runs_dir} is not trusted")
    sweeps = open_sweeps(runs_dir)
    return sweeps.read(sweeps.find(None, sweep_id)).source
