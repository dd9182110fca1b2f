"""The use of a host: cores, memory, shared memory, disks, network."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

_SHM = Path("/dev/shm")  # noqa: S108  # it is measured, not written to


class HostMeter:
    """Measures the host. `folder` names the file system whose use is measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at = time.monotonic()
        self._counters = _counters()

    def read(self, now: float) -> dict[str, float]:
        """The metrics of the host since the last call."""
        before, self._counters = self._counters, _counters()
        seconds, self._at = now - self._at, now
        found = {"cores": float(os.cpu_count() or 1)}
        memory = psutil.virtual_memory()
        found |= {"memory_bytes": float(memory.total - memory.available), "memory_total_bytes": float(memory.total)}
        found["swap_bytes"] = float(psutil.swap_memory().used)
        for name, folder in (("shm", _SHM), ("disk", self._folder)):
            if (space := _space(folder)) is not None:
                found[f"{name}_bytes"], found[f"{name}_total_bytes"] = space
        if (files := _open_files()) is not None:
            found["open_files"] = files
        if seconds <= 0:
            return found
        used = {name: self._counters[name] - before[name] for name in self._counters if name in before}
        busy_s, wait_s, all_s = (used.pop(name, 0.0) for name in ("busy_s", "iowait_s", "all_s"))
        if all_s > 0:
            found |= {"cpu_percent": 100 * busy_s / all_s, "iowait_percent": 100 * wait_s / all_s}
        return found | {name: max(0.0, value / seconds) for name, value in used.items()}


def _counters() -> dict[str, float]:
    """Counters that only grow: CPU seconds, and bytes of disks and network."""
    times = psutil.cpu_times()
    idle_s, iowait_s = times.idle, getattr(times, "iowait", 0.0)
    # Guests are contained in user and nice.
    all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    found = {"busy_s": all_s - idle_s - iowait_s, "iowait_s": iowait_s, "all_s": all_s}
    if (disks := psutil.disk_io_counters()) is not None:
        found |= {"disk_read_bytes_s": float(disks.read_bytes), "disk_write_bytes_s": float(disks.write_bytes)}
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    found["network_receive_bytes_s"] = float(sum(card.bytes_recv for card in cards))
    found["network_send_bytes_s"] = float(sum(card.bytes_sent for card in cards))
    return found


def _space(folder: Path) -> tuple[float, float] | None:
    """Used and total bytes of a file system."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return float((state.f_blocks - state.f_bfree) * state.f_frsize), float(state.f_blocks * state.f_frsize)


def _open_files() -> float | None:
    try:
        return float(Path("/proc/sys/fs/file-nr").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
