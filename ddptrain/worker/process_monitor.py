"""What a worker sees of a rank's processes from outside: CPU time, state, and whether it was out of memory.

A process that the kernel's out-of-memory (OOM) killer has ended cannot report the reason. Control groups (versions 1
and 2) and the kernel count such kills.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddptrain.file_ops import text_or_empty
from ddptrain.worker.system_metrics import members

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # control groups of version 1 write a huge number instead of "max"


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group with a memory controller, and the names of its files."""

    folder: Path
    counter: str
    limit: str

    @property
    def kills(self) -> int | None:
        """The number of OOM kills; None if the group does not count them."""
        for line in text_or_empty(self.folder / self.counter).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
        return None

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit of the group; None if it has none."""
        limit = _number(self.folder / self.limit)
        return None if limit is None or limit >= _NO_LIMIT_BYTES else limit


def groups_of(pid: int, root: Path = _ROOT, proc: Path = Path("/proc")) -> list[ControlGroup]:
    """Return the memory control groups of a process: its own first, then the enclosing ones."""
    groups = []
    for line in text_or_empty(proc / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            names = ("memory.events", "memory.max")
            groups += [ControlGroup(folder, *names) for folder in _with_parents(root, path)]
        elif "memory" in controllers.split(","):
            names = ("memory.oom_control", "memory.limit_in_bytes")
            groups += [ControlGroup(folder, *names) for folder in _with_parents(root / "memory", path)]
    return [group for group in groups if group.kills is not None]


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.strip("/")
    while folder.is_relative_to(root):
        yield folder
        folder = folder.parent


class MemoryWatch:
    """Made when a rank starts; after SIGKILL, finds out whether the rank was out of memory."""

    def __init__(self, pid: int, root: Path = _ROOT, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._groups = groups_of(pid, root, proc)
        self._kills = [group.kills for group in self._groups]
        self._host_kills = self._count_host_kills()

    def explain_kill(self) -> str:
        """Return the likely reason why SIGKILL ended a rank; "" if there is no sign of a memory shortage."""
        if any(group.kills != before for group, before in zip(self._groups, self._kills, strict=True)):
            limit = min((limit for group in self._groups if (limit := group.limit_bytes) is not None), default=None)
            if limit is None:
                return "out of memory (the host's)"
            return f"out of memory (the memory limit of {_gib(limit)} of its control group)"
        if self._count_host_kills() != self._host_kills:
            return "likely out of memory (the kernel has killed a process of this host for it)"
        return ""

    def _count_host_kills(self) -> str:
        lines = text_or_empty(self._proc / "vmstat").splitlines()
        return next((line for line in lines if line.startswith("oom_kill ")), "")


def _number(path: Path) -> int | None:
    text = text_or_empty(path).strip()
    return int(text) if text.isdigit() else None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


# --- CPU time and state ---


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
