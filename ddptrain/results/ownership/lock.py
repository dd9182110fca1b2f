"""The lock of a run: its driver holds it for the life of the run, readers only look."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from enum import Enum
from pathlib import Path

from ddptrain.errors import RunLocked
from ddptrain.results import files
from ddptrain.results.errors import ResultsError, naming

# A reader that looks holds the lock for microseconds, so a driver that finds it taken asks again before it
# gives up.
_PATIENCE_S = 0.5
_FOR_READERS_S = 20.0  # one may have been stopped in the midst of its look
_PAUSE_S = 0.01
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN)
_HOLDER = "process "  # begins what a lock file says
_WHO = re.compile(rf"{_HOLDER}\d+ on [\w.-]+")
_LONGEST_HOLDER_BYTES = 200


class LockState(Enum):
    """What can be seen of a lock from this host. On some network file systems a lock of another host looks free."""

    HELD = "held"
    FREE = "free"
    UNKNOWN = "unknown"  # it belongs to another user, or the file system has no locks


def take(path: Path) -> int:
    """Take the lock; return the descriptor that holds it until it is closed, by the death of the process at
    the latest.

    Raises:
        RunLocked: another process holds it.
        ResultsError: the file can't be created, is not a lock file of this user, or its file system has no locks.
    """
    descriptor = files.open_to_lock(path)
    try:
        _wait_for(descriptor, path)
        if not _names_holder(_holder(descriptor, path)):
            raise ResultsError(f"cannot write {path}: it is not a lock file; move it away")
        with naming(path):
            os.ftruncate(descriptor, 0)
            files.write_all(descriptor, f"{_HOLDER}{os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _wait_for(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                raise ResultsError(
                    f"cannot lock {path}: {error.strerror}; use a folder on a file system with locks"
                ) from error
            if time.monotonic() >= (deadline if _is_taken(descriptor) else deadline + _FOR_READERS_S):
                holder = _holder(descriptor, path).strip() or "another process"
                raise RunLocked(
                    f"run {path.parent.name} is held by {holder}; wait for it, or choose another --run-id"
                ) from error
        time.sleep(_PAUSE_S)


def _holder(descriptor: int, path: Path) -> str:
    """What the file says about who holds the lock."""
    with naming(path, "read"):
        return os.pread(descriptor, _LONGEST_HOLDER_BYTES, 0).decode(errors="replace")


def holder(path: Path) -> str:
    """Who took the lock last, as "process 12 on host"; "" where the file does not say, or can't be read."""
    try:
        match = _WHO.match(files.read_bytes(path).decode(errors="replace"))
    except OSError:
        return ""
    return match[0] if match else ""


def _names_holder(text: str) -> bool:
    """Whether a lock file may say that, at least in part: its writer may have been killed."""
    start = text.strip("\0")[: len(_HOLDER)]
    return _HOLDER.startswith(start)


def look(path: Path) -> LockState:
    """Whether a driver holds the lock, as far as this host can see; a lock that does not exist is free."""
    try:
        descriptor = files.open_to_read(path)
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
    """Whether a process is seen to hold the lock."""
    return look(path) is LockState.HELD


def _is_taken(descriptor: int) -> bool:
    """Whether a driver has the lock, which keeps out readers as well; readers let each other look."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    except OSError as error:
        if error.errno in _TAKEN:
            return True
        raise
