"""The lock of a run directory. The driver holds it for the life of the run; readers only test it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import time
from enum import Enum
from pathlib import Path

from ddptrain import file_ops
from ddptrain.errors import RunLocked
from ddptrain.host_identity import HostId, Relation, process_start, relation, this_host
from ddptrain.log import Log
from ddptrain.results import secure_files
from ddptrain.results.errors import ResultsError, results_errors

# A reader that tests the lock holds it for microseconds. So a driver that cannot take the lock tries again.
_PATIENCE_S = 0.5
_FOR_READERS_S = 20.0  # longer, for a reader that was stopped (SIGSTOP) during its test
_PAUSE_S = 0.01
_log = Log(__name__)
_HOLDER = "process "  # the start of a lock file
_WHO = re.compile(rf"{_HOLDER}(\d+) on [\w.-]+")
_LONGEST_HOLDER_BYTES = 200


class LockState(Enum):
    """The state of a lock as this host sees it. On some network file systems a lock of another host looks free."""

    HELD = "held"
    FREE = "free"
    UNKNOWN = "unknown"  # it belongs to another user, or the file system has no locks


def take(path: Path) -> int:
    """Take the lock; return the descriptor that holds it. Closing it, or the end of the process, releases the lock.

    Raises RunLocked; ResultsError, also for a file system without locks.
    """
    descriptor = secure_files.open_to_lock(path)
    try:
        _wait_for(descriptor, path)
        if not file_ops.is_at(path, descriptor):
            raise RunLocked(f"run {path.parent.name} was deleted by another process; run the command again")
        if not _names_holder(_holder(descriptor, path)):
            raise ResultsError(f"cannot write {path}: it is not a lock file; move it away")
        with results_errors(path):
            os.ftruncate(descriptor, 0)
            identity = {"started": process_start(os.getpid()), "host": dataclasses.asdict(this_host())}
            text = f"{_HOLDER}{os.getpid()} on {socket.gethostname()}\n{json.dumps(identity)}\n"
            file_ops.write_all(descriptor, text.encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _wait_for(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if file_ops.try_lock(descriptor):
                _log.info("run locked", lock=path)
                return
        except OSError as error:
            raise ResultsError(
                f"cannot lock {path}: {error.strerror}; use a folder on a file system with locks"
            ) from error
        if time.monotonic() >= (deadline if _is_taken(descriptor) else deadline + _FOR_READERS_S):
            holder = _holder(descriptor, path).strip() or "another process"
            raise RunLocked(f"run {path.parent.name} is held by {holder}; wait for it, or choose another --run-id")
        time.sleep(_PAUSE_S)


def _holder(descriptor: int, path: Path) -> str:
    """Return the text of the lock file, which names the process that took the lock last."""
    with results_errors(path, "read"):
        return os.pread(descriptor, _LONGEST_HOLDER_BYTES, 0).decode(errors="replace")


def holder(path: Path) -> str:
    """Return the process that took the lock last, as "process 12 on host"; "" if the file does not name it."""
    try:
        match = _WHO.match(secure_files.read_bytes(path).decode(errors="replace"))
    except OSError:
        return ""
    return match[0] if match else ""


def holder_here(path: Path) -> int:
    """Return the process of this host that took the lock last; 0 if it has ended, or is of another host or container.

    Only such a process may get a signal: another host may have the same name.
    """
    match = _WHO.match(holder(path))
    try:
        identity = json.loads(secure_files.read_bytes(path).decode().split("\n")[1])
        is_here = relation(HostId.of(identity["host"]), this_host()) is Relation.SAME
        started = float(identity["started"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # as of a version that does not write it
        return 0
    pid = int(match[1]) if match else 0
    return pid if is_here and pid and started == process_start(pid) > 0 else 0


def _names_holder(text: str) -> bool:
    """Return whether this is the text of a lock file. It may be incomplete, because its writer may have been killed."""
    start = text.strip("\0")[: len(_HOLDER)]
    return _HOLDER.startswith(start)


def look(path: Path) -> LockState:
    """Return whether a driver holds the lock, as far as this host can see; FREE if there is no lock file."""
    try:
        descriptor = file_ops.open_regular(path)
    except FileNotFoundError:
        return LockState.FREE
    except OSError:
        return LockState.UNKNOWN
    try:
        return LockState.HELD if _is_taken(descriptor) else LockState.FREE
    except OSError:
        return LockState.UNKNOWN
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether this host sees that a process holds the lock."""
    return look(path) is LockState.HELD


def _is_taken(descriptor: int) -> bool:
    """Return whether a driver holds the lock, with a shared lock, so that readers do not disturb each other."""
    if not file_ops.try_lock(descriptor, shared=True):
        return True
    file_ops.unlock(descriptor)
    return False
