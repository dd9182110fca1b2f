"""The resource use of a rank and its children, such as DataLoader workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc")


class ProcessUse(NamedTuple):
    """The counters of one process; None if a counter is not readable, for example of another user's process."""

    cpu_s: float
    rss_bytes: int
    read_bytes: int | None
    write_bytes: int | None
    open_files: int | None


def members(groups: Iterable[int]) -> dict[int, list[int]]:
    """Return the pids of the processes in each of these process groups."""
    pids: dict[int, list[int]] = {group: [] for group in groups}
    for name in os.listdir(_PROC):
        if name.isdecimal():
            try:
                group = os.getpgid(int(name))
            except OSError:
                continue  # the process has ended
            if group in pids:
                pids[group].append(int(name))
    return pids


def process_use(pid: int) -> ProcessUse | None:
    """Return the counters of a process; None if it has ended."""
    read = written = files = None
    try:
        process = psutil.Process(pid)
        cpu_s, rss_bytes = sum(process.cpu_times()[:4]), process.memory_info().rss  # with ended children
        with suppress(psutil.AccessDenied):
            counters = process.io_counters()
            read, written, files = counters.read_bytes, counters.write_bytes, process.num_fds()
    except psutil.Error:
        return None
    return ProcessUse(cpu_s, rss_bytes, read, written, files)


def core_wait_s(pid: int, proc: Path = _PROC) -> float | None:
    """Return how many seconds the main thread was ready but had no core; None if the kernel does not count this."""
    try:
        return int((proc / str(pid) / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


@dataclass(slots=True)
class RankMeter:
    """Measures one rank; `pid` is that of its main process, and the number of its process group."""

    pid: int
    _at: float = field(default_factory=time.monotonic)
    _before: Mapping[str, float] = field(default_factory=dict)

    def read(self, pids: Iterable[int], now: float) -> dict[str, float]:
        """Return the metrics of the rank since the last call; {} if it has ended. `pids` are its processes."""
        uses = [use for pid in pids if (use := process_use(pid)) is not None]
        if not uses:
            return {}
        metrics = {"rss_bytes": float(sum(use.rss_bytes for use in uses)), "processes": float(len(uses))}
        if any(use.open_files is not None for use in uses):
            metrics["open_files"] = float(sum(use.open_files or 0 for use in uses))
        counters = {"cpu_percent": 100 * sum(use.cpu_s for use in uses)}
        for name, values in (
            ("read_bytes_s", [use.read_bytes for use in uses]),
            ("write_bytes_s", [use.write_bytes for use in uses]),
        ):
            if any(value is not None for value in values):
                counters[name] = float(sum(value or 0 for value in values))
        if (waited_s := core_wait_s(self.pid)) is not None:
            counters["cpu_wait_percent"] = 100 * waited_s
        return metrics | self._rates(counters, now)

    def _rates(self, counters: Mapping[str, float], now: float) -> dict[str, float]:
        """Return the increase of each counter per second, at least 0: counters of ended children are not included."""
        seconds, before = now - self._at, self._before
        self._at, self._before = now, counters
        if seconds <= 0:
            return {}
        return {name: max(0.0, (value - before[name]) / seconds) for name, value in counters.items() if name in before}
