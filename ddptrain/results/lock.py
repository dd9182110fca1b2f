"""The lock of a run: its driver holds it for the life of the run, readers only look."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from ddptrain.errors import RunLocked
from ddptrain.results.errors import ResultsError, naming

# A reader that looks holds the lock for microseconds, so a driver that finds it taken asks again before it
# gives up.
_PATIENCE_S = 0.5
_FOR_READERS_S = 20.0  # one may have been stopped in the midst of its look
_PAUSE_S = 0.01
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN)


def take(path: Path) -> int:
    """Take the lock; return the descriptor that holds it until it is closed, by the death of the process at
    the latest.

    Raises:
        RunLocked: another process holds it.
        ResultsError: the file can't be created, or its file system has no locks.
    """
    with naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait_for(descriptor, path)
        with naming(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
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
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                raise RunLocked(
                    f"run {path.parent.name} is held by {holder}; wait for it, or choose another --run-id"
                ) from error
        time.sleep(_PAUSE_S)


def is_held(path: Path) -> bool:
    """Whether a process of this host holds the lock; a lock that does not exist is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _is_taken(descriptor)
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    """Whether a driver has the lock, which keeps out readers as well; readers let each other look."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    except OSError as error:
        return error.errno in _TAKEN
