"""What the kernel offers for keeping hold of child processes (Linux; elsewhere each is a harmless no-op)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def _prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Inherit orphaned descendants, so that none escapes by outliving its parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_of_sigterm() -> None:
    """End as a process does that has no handler for SIGTERM; safe in any thread, unlike Python's own signal()."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGTERM), None)  # SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)


def name_process(name: str) -> None:
    """Set what `ps` and `top` show (15 bytes at the most)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def thread_count() -> int:
    """Threads of this process; 1 where the system doesn't tell."""
    tasks = Path("/proc/self/task")
    return len(os.listdir(tasks)) if tasks.exists() else 1


def signal_group(pgid: int, number: int) -> None:
    """Send a signal to a whole process group; nothing happens where it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def kill_descendants() -> None:
    """SIGKILL every child of this process, and theirs: they were ranks' children that left their group."""
    for pid in _children(os.getpid()):
        _kill_tree(pid)


def _kill_tree(pid: int) -> None:
    children = _children(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill_tree(child)


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(word) for task in tasks for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return []
