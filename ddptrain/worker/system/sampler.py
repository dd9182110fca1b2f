"""Samples the host and its ranks in one thread of the worker, and sends one message for each run."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddptrain.file_ops import text_or_empty
from ddptrain.log import Log
from ddptrain.protocol.worker_notices import MAX_SAMPLED_RANKS, SystemSample
from ddptrain.worker.system.gpu_metrics import GpuReader
from ddptrain.worker.system.process_metrics import RankMeter, members

_FIRST_S = 1.0  # from the start of a run's ranks to their first sample, so that short runs have one
_log = Log(__name__)

_SHM = Path("/dev/shm")  # noqa: S108  # it is measured; nothing is written there

Send = Callable[[SystemSample], None]


@dataclass(frozen=True, slots=True)
class SampledRank:
    """A rank to sample: `pid` leads its process group, `gpu` is an entry of CUDA_VISIBLE_DEVICES or None."""

    run_id: str
    attempt: int
    rank: int
    pid: int
    gpu: str | None
    every_s: float
    send: Send


@dataclass(slots=True)
class _RunClock:
    """When the next sample of a run is due (monotonic), the interval in seconds, and the run's meter of the host."""

    due: float
    every_s: float
    host: HostMeter


class SystemSampler:
    """Samples the host while it has ranks; the thread ends with the last rank."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._lock = threading.Condition()
        self._ranks: dict[str, tuple[SampledRank, RankMeter]] = {}  # by the key of the rank's task
        self._runs: dict[tuple[str, int], _RunClock] = {}  # by run and attempt
        self._gpus = GpuReader()
        self._thread: threading.Thread | None = None

    def add(self, key: str, rank: SampledRank) -> None:
        """Sample a rank from now on."""
        with self._lock:
            self._ranks[key] = rank, RankMeter(rank.pid)
            run = rank.run_id, rank.attempt
            if run not in self._runs:
                due = time.monotonic() + min(_FIRST_S, rank.every_s)
                self._runs[run] = _RunClock(due, rank.every_s, HostMeter(self._scratch))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ddptrain-system", daemon=True)
                self._thread.start()
            self._lock.notify()

    def remove(self, key: str) -> None:
        """Stop sampling a rank."""
        with self._lock:
            self._ranks.pop(key, None)
            left = {(rank.run_id, rank.attempt) for rank, _ in self._ranks.values()}
            self._runs = {run: clock for run, clock in self._runs.items() if run in left}
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._runs:
                    self._thread = None
                    return
                now = time.monotonic()
                due = min(clock.due for clock in self._runs.values())
                if due > now:
                    self._lock.wait(due - now)
                    continue
                run, clock = min(self._runs.items(), key=lambda item: item[1].due)
                clock.due = max(now, clock.due) + clock.every_s
                ranks = [pair for pair in self._ranks.values() if (pair[0].run_id, pair[0].attempt) == run]
            try:
                for send, sample in self._samples(ranks, clock.host):
                    send(sample)
            except Exception as error:  # unexpected values of /proc and NVML must not affect the ranks
                _log.warning("system metrics not sampled", run=run[0], error=f"{type(error).__name__}: {error}")

    def _samples(
        self, ranks: list[tuple[SampledRank, RankMeter]], host: HostMeter
    ) -> Iterator[tuple[Send, SystemSample]]:
        groups = members(rank.pid for rank, _ in ranks)
        now, time_ns = time.monotonic(), time.time_ns()
        uses: dict[int, Mapping[str, float]] = {}
        for rank, meter in ranks:
            use = meter.read(groups[rank.pid], now)
            if use and rank.gpu is not None:
                use |= self._gpus.read(rank.gpu)
            if use:
                uses[rank.rank] = _rounded(use)
        if not uses:
            return
        first = ranks[0][0]
        use_of_host, numbers = _rounded(host.read(now)), sorted(uses)
        for start in range(0, len(numbers), MAX_SAMPLED_RANKS):
            part = numbers[start : start + MAX_SAMPLED_RANKS]
            selected = {str(rank): uses[rank] for rank in part}
            yield first.send, SystemSample(first.attempt, part[0], time_ns, socket.gethostname(), use_of_host, selected)


def _rounded(use: Mapping[str, float]) -> dict[str, float]:
    """Return the values rounded: large ones to whole numbers, others to two decimal places."""
    return {name: round(value) if abs(value) >= 1000 else round(value, 2) for name, value in use.items()}


# --- the host: cores, memory, shared memory, disks, network ---


class HostMeter:
    """Measures the host. `folder` names the file system whose use is measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at = time.monotonic()
        self._counters = _counters()

    def read(self, now: float) -> dict[str, float]:
        """Return the metrics of the host; rates are means since the last call."""
        before, self._counters = self._counters, _counters()
        seconds, self._at = now - self._at, now
        metrics = {"cores": float(os.cpu_count() or 1)}
        memory = psutil.virtual_memory()
        metrics |= {"memory_bytes": float(memory.total - memory.available), "memory_total_bytes": float(memory.total)}
        metrics["swap_bytes"] = float(psutil.swap_memory().used)
        for name, folder in (("shm", _SHM), ("disk", self._folder)):
            if (space := _space(folder)) is not None:
                metrics[f"{name}_bytes"], metrics[f"{name}_total_bytes"] = space
        if (files := _open_files()) is not None:
            metrics["open_files"] = files
        if seconds <= 0:
            return metrics
        used = {name: self._counters[name] - before[name] for name in self._counters if name in before}
        busy_s, wait_s, all_s = (used.pop(name, 0.0) for name in ("busy_s", "iowait_s", "all_s"))
        if all_s > 0:
            metrics |= {"cpu_percent": 100 * busy_s / all_s, "iowait_percent": 100 * wait_s / all_s}
        return metrics | {name: max(0.0, value / seconds) for name, value in used.items()}


def _counters() -> dict[str, float]:
    """Return counters that only grow: CPU seconds, and bytes of disks and network."""
    times = psutil.cpu_times()
    idle_s, iowait_s = times.idle, getattr(times, "iowait", 0.0)
    # The times `user` and `nice` include those of guests.
    all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    counters = {"busy_s": all_s - idle_s - iowait_s, "iowait_s": iowait_s, "all_s": all_s}
    if (disks := psutil.disk_io_counters()) is not None:
        counters |= {"disk_read_bytes_s": float(disks.read_bytes), "disk_write_bytes_s": float(disks.write_bytes)}
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    counters["network_receive_bytes_s"] = float(sum(card.bytes_recv for card in cards))
    counters["network_send_bytes_s"] = float(sum(card.bytes_sent for card in cards))
    return counters


def _space(folder: Path) -> tuple[float, float] | None:
    """Return the used and total bytes of a file system; None if it can't be read."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return float((state.f_blocks - state.f_bfree) * state.f_frsize), float(state.f_blocks * state.f_frsize)


def _open_files() -> float | None:
    numbers = text_or_empty(Path("/proc/sys/fs/file-nr")).split()
    return float(numbers[0]) if numbers else None
