"""Finds what a test leaves behind: processes, threads and changed environment variables."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

GRACE_S = 30.0
# In the environment of every process that a test starts, and of those that these start. It identifies a process even
# after its parent has died.
MARK = "DDPTRAIN_TESTS"

# They belong to the interpreter, and end with it.
_LASTING_THREADS = ("Dask-Offload", "asyncio_", "pytest_timeout")
_LASTING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_FREE_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # torch sets its own


class Snapshot:
    """The state before a test. `leaks` compares it with the state after the test, and cleans up."""

    def __init__(self) -> None:
        self._pids = _all_pids()
        self._threads = set(threading.enumerate())
        self._environment = dict(os.environ)

    def leaks(self) -> list[str]:
        """What is left after a grace, one line each. Processes are killed, variables are set back."""
        return [*_changed_variables(self._environment), *_left_threads(self._threads), *_left_processes(self._pids)]


def _changed_variables(before: Mapping[str, str]) -> list[str]:
    names = sorted({*before, *os.environ} - {*_FREE_VARIABLES})
    changed = [name for name in names if before.get(name) != os.environ.get(name)]
    told = [f"environment: {name}={os.environ.get(name)!r}, was {before.get(name)!r}" for name in changed]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return told


def _left_threads(before: set[threading.Thread]) -> list[str]:
    """Threads that would keep the interpreter from ending."""

    def left() -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread not in before and not thread.daemon and not thread.name.startswith(_LASTING_THREADS)
        ]

    deadline = time.monotonic() + GRACE_S
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    return [f"thread: {thread.name}" for thread in left()]


def _left_processes(before: set[int]) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    left = _our_processes(before)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {process: command for process, command in left.items() if _is_live(process)} or _our_processes(before)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return [f"process: {process.pid} {command}" for process, command in left.items()]


def _our_processes(before: set[int]) -> dict[psutil.Process, str]:
    """Live processes that this pytest process is the origin of and that are not in `before`, with their commands."""
    found = {}
    descendants = _descendants(os.getpid())
    for pid in _all_pids() - before:
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            ours = pid in descendants or process.environ().get(MARK) == os.environ[MARK]
            if ours and command and _is_live(process) and not any(name in command for name in _LASTING_PROCESSES):
                found[process] = command
    return found


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child, *_descendants(child)}
    return found


def _is_live(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
