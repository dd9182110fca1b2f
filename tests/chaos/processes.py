"""Processes according to /proc: which belong to a case, and which were left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MARK = "DDPTRAIN_CHAOS"  # in the environment of every process of a case
SESSION = "DDPTRAIN_CHAOS_SESSION"  # in the environment of every process that one run of the suite starts
_SERVER = "ddptrain-ranks"  # a worker has one as long as it lives


def marked(mark: str) -> set[int]:
    """Live processes with the mark in their environment: driver, embedded worker, rank server, and their children."""
    return _with_variable(f"{MARK}={mark}\0".encode())


def _with_variable(wanted: bytes) -> set[int]:
    found = set()
    for pid in _all():
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes() + b"\0" and not _is_zombie(pid):
                found.add(pid)
    return found


def of_session() -> set[int]:
    """Live processes that this run of the chaos suite has started, with all that come of them."""
    return _with_variable(f"{SESSION}={os.environ[SESSION]}\0".encode())


def ranks_below(worker: int) -> set[int]:
    """Live descendants of a running worker, except its rank server."""
    return {pid for pid in descendants(worker) if _comm(pid) != _SERVER and not _is_zombie(pid)}


def descendants(pid: int) -> set[int]:
    """All descendants of a process."""
    found: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child, *descendants(child)}
    return found


def named(name: str, pids: Iterable[int]) -> int | None:
    """The process with a name among `pids`."""
    return next((pid for pid in pids if _comm(pid) == name), None)


def describe(pid: int) -> str:
    """The description of a process for a report."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{pid} {_comm(pid)} ({command.strip()[-80:]})"
    return f"{pid} (gone)"


def until_none(find: Callable[[], set[int]], timeout_s: float) -> set[int]:
    """Wait until no process is left, at most `timeout_s`. Returns those that are left."""
    deadline = time.monotonic() + timeout_s
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    return True
