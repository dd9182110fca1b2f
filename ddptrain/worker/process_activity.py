"""Observes a rank's process group from outside: its CPU time, and whether it is stopped."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

from ddptrain.file_ops import text_or_empty
from ddptrain.worker.system_metrics import members

_SEARCH_S = 30.0  # between two searches for the processes of the group


class ProcessMonitor:
    """Observes the process group that `pid` leads."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._members: list[int] = []
        self._searched_at = -_SEARCH_S

    def cpu_s(self) -> float:
        """Return the CPU time in seconds of the rank and its children, such as DataLoader workers."""
        if time.monotonic() - self._searched_at > _SEARCH_S:
            self._searched_at = time.monotonic()
            self._members = members([self._pid])[self._pid]
        total = 0.0
        for member in self._members:
            with contextlib.suppress(psutil.Error):
                # User and system time, of the process and of its ended children.
                total += sum(psutil.Process(member).cpu_times()[:4])
        return total

    def status(self) -> str:
        """Return the leader's state in psutil's terms, such as "running" or "stopped"; "" if it has ended."""
        try:
            return str(psutil.Process(self._pid).status())
        except psutil.Error:
            return ""


def has_handler(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal; without one the signal would end the process."""
    lines = text_or_empty(Path(f"/proc/{pid}/status")).splitlines()
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)
