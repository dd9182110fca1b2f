"""Controls processes: names, signals, death with the parent. Most functions do nothing on systems other than Linux."""

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


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGKILL to this process when its parent, `parent`, exits for any reason."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has exited before the call
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, so that they can still be found and killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_of_sigterm() -> None:
    """End this process by SIGTERM with the default handler. Safe in any thread, unlike `signal.signal`."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGTERM), None)  # SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)


def name_process(name: str, title: str = "") -> None:
    """Set the process name that `top` shows (at most 15 bytes), and as `title` the command line that `ps` shows.

    The title is cut to the length of the command line, so that the environment stays readable in /proc.
    """
    if title:
        os.environ["SPT_NOENV"] = "1"
        with contextlib.suppress(ImportError):  # a foreign worker may lack this package
            import setproctitle

            setproctitle.setproctitle(title)
        del os.environ["SPT_NOENV"]
    _prctl(_PR_SET_NAME, name.encode()[:15])


def thread_names() -> list[str]:
    """Return the names of this process's threads, also of those that libraries have started; [] without /proc."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            names.append(path.read_text().strip())
    return names


def signal_group(pgid: int, number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def kill_descendants() -> None:
    """Send SIGKILL to all descendants of this process, also to those that have left the process group of their rank."""
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
