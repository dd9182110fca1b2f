"""The folder of a sweep: a new one, or that of a sweep to resume, with its lock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddptrain.config.load import load_data
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import describe_value, nearest, shorten
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results.errors import naming
from ddptrain.results.layout import new_run_id
from ddptrain.results.lookup import moment
from ddptrain.results.ownership import run_lock
from ddptrain.results.ownership.claim import check_run_id
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.results.run_files import is_own_folder, read_bytes, require_own_folder, write_file
from ddptrain.results.run_store import LocalRuns
from ddptrain.sweep.records import SWEEP_JSON, SweepRecord, read_sweep

JOURNAL, CONFIG, LOG, BEST, LOCK, SCRATCH = (
    "journal.log",
    "config.yaml",
    "driver.log",
    "best.yaml",
    "sweep.lock",
    ".scratch",
)
# What may differ when a sweep is resumed: how long it goes on, and how much at the same time.
_MAY_DIFFER = frozenset({"trials", "for", "parallel", "prune"})


def runs_folder(results_dir: str) -> Path:
    """Return the folder of runs. Raises UsageError for an object store."""
    runs = open_runs_dir(results_dir)
    if not isinstance(runs, LocalRuns):
        raise UsageError(
            f"a sweep keeps its journal in a folder, and results.dir is {results_dir}: give a folder with --runs-dir"
        )
    return runs.folder.absolute()


def new_folder(runs: Path, name: str, sweep_id: str | None) -> Path:
    """Make the folder of a new sweep. Raises UsageError if the id is invalid or taken; ResultsError."""
    if sweep_id is not None:
        check_run_id(sweep_id)
    folder = runs / (sweep_id or new_run_id(name))
    with naming(folder):
        runs.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o755)
        except FileExistsError:
            hint = "continue it with --resume" if (folder / SWEEP_JSON).exists() else "choose another --sweep-id"
            raise UsageError(f"{folder} exists already; {hint}") from None
    return folder


def sweeps_in(runs: Path) -> dict[str, SweepRecord]:
    """Return the sweeps of this user in a folder that can be read, by id, the newest first."""
    found: dict[str, SweepRecord] = {}
    try:
        folders = [path for path in runs.iterdir() if (path / SWEEP_JSON).is_file() and is_own_folder(path)]
    except OSError:
        return {}
    for folder in folders:
        try:
            found[folder.name] = read_sweep(folder)
        except UsageError:
            continue
    return dict(sorted(found.items(), key=lambda item: (str(moment(item[1].started_at)), item[0]), reverse=True))


def find_sweep(runs: Path, name: str | None, sweep_id: str | None) -> Path:
    """Return the folder of a sweep: that id, or the newest (of that name). Raises RunNotFound."""
    found = sweeps_in(runs)
    if sweep_id is not None:
        if sweep_id in found:
            return runs / sweep_id
        match = nearest(sweep_id, list(found))
        hint = f"; did you mean {match}?" if match else ""
        raise RunNotFound(f'no sweep "{shorten(sweep_id)}" in {runs}{hint}')
    named = [each for each, record in found.items() if name in (None, record.name)]
    if not named:
        raise RunNotFound(f"there is no sweep{f' named {name}' if name else ''} in {runs} to resume")
    return runs / named[0]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep. Raises RunLocked if another driver has it; ResultsError."""
    require_own_folder(folder)
    descriptor = run_lock.take(folder / LOCK)
    try:
        yield
    finally:
        os.close(descriptor)


def save_config(folder: Path, resolved: ResolvedConfig) -> None:
    """Write config.yaml of a sweep. Raises ResultsError."""
    write_file(folder / CONFIG, resolved.yaml_text.encode())


def check_same(folder: Path, resolved: ResolvedConfig) -> None:
    """Compare the configuration with that of the sweep to resume. Raises UsageError that lists the differences."""
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
    sweep = data.get("sweep")
    kept = (
        {name: value for name, value in sweep.items() if name not in _MAY_DIFFER} if isinstance(sweep, Mapping) else {}
    )
    flat = {f"sweep.{name}": value for name, value in kept.items()}
    params = data.get("params")
    flat |= {f"params.{name}": value for name, value in params.items()} if isinstance(params, Mapping) else {}
    return {"workload": data.get("workload"), **flat}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield f"{name}: was {describe_value(before.get(name))}, is {describe_value(now.get(name))}"
