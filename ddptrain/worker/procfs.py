"""What the kernel tells of a rank's process: how much it works, and whether it is stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path

_SEARCH_S = 30.0  # between two searches for the processes that belong to a rank
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _GROUP, _TIMES = 0, 2, slice(11, 15)  # fields of /proc/PID/stat after the name


class Vitals:
    """A rank's process group, seen from outside; `pid` leads the group."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._members = [pid]
        self._searched_at = -_SEARCH_S

    def cpu_s(self) -> float:
        """Processor time that the rank has used, with that of its children (a DataLoader's workers, say)."""
        if time.monotonic() - self._searched_at > _SEARCH_S:
            self._searched_at = time.monotonic()
            self._members = _members(self._pid)
        ticks = sum(sum(int(word) for word in _fields(pid)[_TIMES]) for pid in self._members)
        return ticks / _TICKS_PER_S

    def state(self) -> str:
        """The kernel's letter for what the rank does: R runs, S waits, T is stopped, D waits in the kernel."""
        fields = _fields(self._pid)
        return fields[_STATE] if fields else ""


def _members(group: int) -> list[int]:
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _fields(pid)) and int(fields[_GROUP]) == group]


def _fields(pid: int) -> list[str]:
    """Of a process that has gone, none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name may hold anything


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, which would else end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)
