"""Stops a sweep from another shell of the driver's host: a signal to the process that holds its lock."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddptrain.errors import ClusterError, UsageError
from ddptrain.results.ownership import run_lock
from ddptrain.results.run_files import require_own_folder
from ddptrain.sweep.folder import LOCK
from ddptrain.sweep.records import SWEEP_JSON, SweepRecord, read_sweep

_HOLDER = re.compile(r"process (\d+) on (\S+)")
_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.2
_BETWEEN_S = 0.5  # two signals at once would count as one


def sweep_folder(runs_dir: str, name: str) -> Path | None:
    """Return the folder of the sweep of that name or path, None if there is none."""
    for folder in (Path(runs_dir) / name, Path(name)):
        with suppress(OSError, ValueError):
            if (folder / SWEEP_JSON).is_file():
                return folder
    return None


def stop_sweep(folder: Path, *, now: bool, tell: Callable[[str], None]) -> tuple[SweepRecord, bool]:
    """End a sweep, wait until it has ended, and return its record and whether it was running.

    `now`: the ranks do not save first. Raises UsageError if its driver is on another host; ClusterError if it has not
    ended within two minutes; ResultsError.
    """
    require_own_folder(folder)
    lock = folder / LOCK
    if not run_lock.is_held(lock):
        return read_sweep(folder), False
    found = _HOLDER.match(run_lock.holder(lock))
    if found is None or found[2] != socket.gethostname():
        where = found[2] if found else "another host"
        raise UsageError(f"sweep {folder.name} can only be stopped on {where}, where its driver runs")
    pid = int(found[1])
    for number in range(2 if now else 1):
        if number:
            time.sleep(_BETWEEN_S)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    tell(f"waiting for sweep {folder.name} to end: process {pid}")
    deadline = time.monotonic() + _WITHIN_S
    while run_lock.is_held(lock):
        if time.monotonic() > deadline:
            raise ClusterError(f"sweep {folder.name} has not ended after {_WITHIN_S:g} s; look at process {pid}")
        time.sleep(_LOOK_EVERY_S)
    return read_sweep(folder), True
