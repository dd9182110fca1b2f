"""Stops a sweep from another shell of the driver's host: a signal to the process that holds its lock."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.errors import ClusterError, UsageError
from ddptrain.results import ownership
from ddptrain.results.layout import valid_run_id
from ddptrain.results.remote.lease import LOCK as LEASE
from ddptrain.results.remote.lease import claim_from
from ddptrain.results.remote.runs import StoreRuns, split_run
from ddptrain.results.secure_files import require_own_folder
from ddptrain.storage.remote_folder import RemoteFolder, is_url
from ddptrain.sweep.folder import LOCK
from ddptrain.sweep.records import SWEEP_JSON, SweepRecord, parse_sweep, read_sweep
from ddptrain.sweep.stored import WORK_LOCK
from ddptrain.text_tables import clean_line

_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.2
_STORE_EVERY_S = 2.0
_BETWEEN_S = 0.5  # two signals at once would count as one


@dataclass(frozen=True, slots=True)
class SweepTarget:
    """A sweep that may be running. holder: its driver's process (0: not of this host) and host; None without driver."""

    name: str
    read: Callable[[], SweepRecord]
    holder: Callable[[], tuple[int, str] | None]
    look_every_s: float = _LOOK_EVERY_S


def find_target(runs_dir: str, name: str) -> SweepTarget | None:
    """Return the sweep of that name, path or URL; None if there is none.

    Raises UsageError, StoreError; ResultsError if its folder is not of this user.
    """
    place, name = split_run(name, runs_dir)
    if is_url(place):
        return _stored(StoreRuns(RemoteFolder.open(place)), name) if valid_run_id(name) else None
    folder = sweep_folder(place, name)
    return None if folder is None else local_target(folder)


def local_target(folder: Path) -> SweepTarget:
    """Return the sweep of a folder. Raises ResultsError if the folder is not of this user."""
    require_own_folder(folder)
    return SweepTarget(folder.name, lambda: read_sweep(folder), lambda: _holder(folder / LOCK))


def _stored(runs: StoreRuns, name: str) -> SweepTarget | None:
    """The process is the one that holds the lock of the working folder here: what the store says is not trusted."""
    sweep, lock = runs.store.below(name), runs.work / name / WORK_LOCK
    if sweep.read(SWEEP_JSON) is None:
        return None

    def holder() -> tuple[int, str] | None:
        if owner := _holder(lock):
            return owner
        claim = claim_from(sweep.read(LEASE))
        return (0, claim.host) if claim is not None and claim.is_held() else None

    def read() -> SweepRecord:
        return parse_sweep(sweep.read(SWEEP_JSON) or b"", f"{sweep.url}/{SWEEP_JSON}")

    return SweepTarget(name, read, holder, _STORE_EVERY_S)


def _holder(lock: Path) -> tuple[int, str] | None:
    if not ownership.is_held(lock):
        return None
    return ownership.holder_here(lock), ownership.holder(lock).rpartition(" on ")[2]


def sweep_folder(runs_dir: str, name: str) -> Path | None:
    """Return the folder of the sweep of that name or path, None if there is none."""
    for folder in (Path(runs_dir) / name, Path(name)):
        with suppress(OSError, ValueError):
            if (folder / SWEEP_JSON).is_file():
                return folder
    return None


def stop_sweep(target: SweepTarget, *, now: bool, tell: Callable[[str], None]) -> tuple[SweepRecord, bool]:
    """End a sweep, wait until it has ended, and return its record and whether it was running.

    `now`: the ranks do not save first. Raises UsageError if its driver is on another host; ClusterError if it has not
    ended within two minutes; StoreError.
    """
    holder = target.holder()
    if holder is None:
        return target.read(), False
    pid, host = holder
    if not pid:
        where = clean_line(host) or "another host"
        if host == socket.gethostname():
            where = f"another machine or container that is also called {where}"
        raise UsageError(f"sweep {target.name} can only be stopped on {where}, where its driver runs")
    for number in range(2 if now else 1):
        if number:
            time.sleep(_BETWEEN_S)
        with suppress(ProcessLookupError):
            if target.holder() == holder:  # still the same process
                os.kill(pid, signal.SIGTERM)
    tell(f"waiting for sweep {target.name} to end: process {pid}")
    deadline = time.monotonic() + _WITHIN_S
    while target.holder() is not None:
        if time.monotonic() > deadline:
            raise ClusterError(f"sweep {target.name} has not ended after {_WITHIN_S:g} s; look at process {pid}")
        time.sleep(target.look_every_s)
    return target.read(), True
