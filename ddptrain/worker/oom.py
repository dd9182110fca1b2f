"""Whether the kernel has killed a rank because memory ran out: counted by its control group, or else guessed.

A kill leaves no word in the process that it hits. Control groups count their kills (versions 1 and 2); where nothing
counts, a rank that was short of memory a moment before has likely been killed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NEARLY = 0.95  # of a limit
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes a huge number


@dataclass(frozen=True, slots=True)
class Group:
    """A control group with a memory controller: where it counts kills, and its limit and use."""

    folder: Path
    counter: str
    limit: str
    usage: str

    @property
    def kills(self) -> int | None:
        """How many processes were killed; None where it does not count."""
        for line in _read(self.folder / self.counter).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
        return None

    @property
    def limit_bytes(self) -> int | None:
        """What its processes may use together; None where that is all there is."""
        limit = _number(self.folder / self.limit)
        return None if limit is None or limit >= _NO_LIMIT_BYTES else limit

    @property
    def usage_bytes(self) -> int:
        """What they use."""
        return _number(self.folder / self.usage) or 0


def groups_of(pid: int, root: Path = _ROOT, proc: Path = Path("/proc")) -> list[Group]:
    """The memory groups of a process, its own first and those around it after."""
    found = []
    for line in _read(proc / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            names = ("memory.events", "memory.max", "memory.current")
            found += [Group(folder, *names) for folder in _upwards(root, path)]
        elif "memory" in controllers.split(","):
            names = ("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes")
            found += [Group(folder, *names) for folder in _upwards(root / "memory", path)]
    return [group for group in found if group.kills is not None]


def _upwards(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.strip("/")
    while folder.is_relative_to(root):
        yield folder
        folder = folder.parent


class MemoryWatch:
    """Looks at a rank's memory while it runs, and says after SIGKILL whether it ran out."""

    def __init__(self, pid: int, root: Path = _ROOT, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._groups = groups_of(pid, root, proc)
        self._kills = [group.kills for group in self._groups]
        self._host_kills = self._count_of_host()
        self._tight = ""

    def look(self) -> None:
        """Remember whether memory is nearly used up; cheap enough for once a second."""
        self._tight = ""
        for group in self._groups:
            limit = group.limit_bytes
            if limit is not None and group.usage_bytes >= _NEARLY * limit:
                self._tight = f"{_gib(group.usage_bytes)} of {_gib(limit)} of its control group were used"
                return
        numbers = dict(line.split(":") for line in _read(self._proc / "meminfo").splitlines() if ":" in line)
        total, available = (_kib(numbers.get(name, "")) for name in ("MemTotal", "MemAvailable"))
        if total and available < (1 - _NEARLY) * total:
            self._tight = f"{_gib(available)} of the host's {_gib(total)} were left"

    def why(self) -> str:
        """Why a rank that was sent SIGKILL was killed; empty where nothing points to its memory."""
        if any(group.kills != before for group, before in zip(self._groups, self._kills, strict=True)):
            limit = min((limit for group in self._groups if (limit := group.limit_bytes) is not None), default=None)
            if limit is None:
                return "out of memory (the host's)"
            return f"out of memory (the memory limit of {_gib(limit)} of its control group)"
        if self._count_of_host() != self._host_kills:
            return "likely out of memory (the kernel has killed a process of this host for it)"
        return f"likely out of memory ({self._tight} shortly before)" if self._tight else ""

    def _count_of_host(self) -> str:
        lines = _read(self._proc / "vmstat").splitlines()
        return next((line for line in lines if line.startswith("oom_kill ")), "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _kib(text: str) -> int:
    word = text.strip().partition(" ")[0]
    return int(word) * 1024 if word.isdigit() else 0


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
