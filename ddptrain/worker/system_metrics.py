"""Measures a host, its ranks and their GPUs from outside; and finds out whether a rank was out of memory."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ddptrain.file_ops import text_or_empty
from ddptrain.protocol.news import MAX_SAMPLED_RANKS, SystemSample

_EVERY_S = 5.0
_FIRST_S = 1.0  # from the start of the ranks, so that short runs have a sample


@dataclass(frozen=True, slots=True)
class SampledRank:
    """A rank to sample: `pid` leads its process group, `gpu` is an entry of CUDA_VISIBLE_DEVICES or None."""

    rank: int
    pid: int
    gpu: str | None


class SystemSampler:
    """Measures in a thread, because a call of NVML may hang: a broken GPU must not silence the worker.

    samples: what was measured and not yet sent. errors: why it could not be measured, and is not yet logged.
    """

    def __init__(self, ranks: Callable[[], Sequence[SampledRank]], gpu_every_s: float) -> None:
        """Measure the use of GPUs every `gpu_every_s` seconds, and all metrics every five seconds."""
        self._ranks = ranks
        self.samples: queue.SimpleQueue[SystemSample] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._percents: dict[str, float] = {}
        self._gpu_every_s = gpu_every_s
        self._stop = threading.Event()
        self._host = Rates()
        self._host.of(_host_counters(), time.monotonic())
        self._of_ranks: dict[int, Rates] = defaultdict(Rates)
        self._gpus = GpuReader()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="ddptrain-metrics", daemon=True).start()

    def stop(self) -> None:
        """End the thread after its current measurement. Does not wait: that may never end."""
        self._stop.set()

    def gpu_percent(self, gpu: str | None) -> float | None:
        """Return the use of a GPU in percent, if it was measured since the last call."""
        return self._percents.pop(gpu, None) if gpu is not None else None

    def _run(self) -> None:
        sample_at, known = time.monotonic() + _FIRST_S, ""
        while not self._stop.wait(min(self._gpu_every_s, max(0.0, sample_at - time.monotonic()))):
            try:
                for gpu in {rank.gpu for rank in self._ranks() if rank.gpu is not None}:
                    if use := self._gpus.read(gpu, ("gpu_percent",)):
                        self._percents[gpu] = use["gpu_percent"]
                if time.monotonic() >= sample_at:
                    sample_at = time.monotonic() + _EVERY_S
                    for sample in self.measure():
                        self.samples.put(sample)
            except Exception as error:  # unexpected values of /proc and NVML must not affect the ranks
                if (text := f"{type(error).__name__}: {error}") != known:
                    known = text
                    self.errors.put(text)

    def measure(self) -> Iterator[SystemSample]:
        """Yield the use of the host with that of up to MAX_SAMPLED_RANKS ranks each; nothing if all have ended.

        Rates are those since the last call, for the host since the creation.
        """
        ranks = self._ranks()
        groups = members(rank.pid for rank in ranks)
        now, time_ns = time.monotonic(), time.time_ns()
        uses: dict[int, Mapping[str, float]] = {}
        for rank in ranks:
            if use := rank_use(groups[rank.pid], self._of_ranks[rank.rank], now):
                uses[rank.rank] = _rounded(use | (self._gpus.read(rank.gpu) if rank.gpu is not None else {}))
        of_host = _rounded(_host_use(self._host, now)) if uses else {}
        for start in range(0, len(uses), MAX_SAMPLED_RANKS):
            numbers = sorted(uses)[start : start + MAX_SAMPLED_RANKS]
            selected = {str(rank): uses[rank] for rank in numbers}
            yield SystemSample(numbers[0], time_ns, socket.gethostname(), of_host, selected)


def _rounded(use: Mapping[str, float]) -> dict[str, float]:
    """Return the values rounded: large ones to whole numbers, others to two decimal places."""
    return {name: round(value) if abs(value) >= 1000 else round(value, 2) for name, value in use.items()}


@dataclass(slots=True)
class Rates:
    """The increase of counters per second since the last call, at least 0: counters of ended children are missing."""

    _at: float = field(default_factory=time.monotonic)
    _before: Mapping[str, float] = field(default_factory=dict)

    def of(self, counters: Mapping[str, float], now: float) -> dict[str, float]:
        """Return the rates of these counters; of a new one none."""
        seconds, before = now - self._at, self._before
        self._at, self._before = now, counters
        if seconds <= 0:
            return {}
        return {name: max(0.0, (value - before[name]) / seconds) for name, value in counters.items() if name in before}


# --- the host and the processes of a rank ---


def _host_use(rates: Rates, now: float) -> dict[str, float]:
    memory = psutil.virtual_memory()
    used = {"memory_bytes": float(memory.total - memory.available), "memory_total_bytes": float(memory.total)}
    return used | rates.of(_host_counters(), now)


def _host_counters() -> dict[str, float]:
    """Return counters that only grow: seconds of use of all cores in percent, and bytes of disks and network."""
    times = psutil.cpu_times()
    # The times `user` and `nice` include those of guests.
    busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0)
    busy_s -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    counters = {"cpu_percent": 100 * busy_s / (os.cpu_count() or 1)}
    if (disks := psutil.disk_io_counters()) is not None:
        counters["disk_bytes_s"] = float(disks.read_bytes + disks.write_bytes)
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    counters["network_bytes_s"] = float(sum(card.bytes_recv + card.bytes_sent for card in cards))
    return counters


def members(groups: Iterable[int]) -> dict[int, list[int]]:
    """Return the pids of the processes in each of these process groups."""
    pids: dict[int, list[int]] = {group: [] for group in groups}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):  # the process has ended
                if (group := os.getpgid(int(name))) in pids:
                    pids[group].append(int(name))
    return pids


def rank_use(pids: Iterable[int], rates: Rates, now: float) -> dict[str, float]:
    """Return the metrics of a rank with these processes; {} if all have ended."""
    rss_bytes, processes = 0, 0
    cpu_s = cpu_seconds(pids := list(pids))
    for pid in pids:
        with suppress(psutil.Error):
            rss_bytes += psutil.Process(pid).memory_info().rss
            processes += 1
    if not processes:
        return {}
    used = {"rss_bytes": float(rss_bytes), "processes": float(processes)}
    return used | rates.of({"cpu_percent": 100 * cpu_s}, now)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of these processes and of their ended children."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            total += sum(psutil.Process(pid).cpu_times()[:4])
    return total


# --- GPUs ---

# The function that reads each metric; its arguments are NVML's module and a device handle.
_MEASURES: dict[str, Callable[[Any, Any], float]] = {
    "gpu_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu_memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "gpu_memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "gpu_power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "gpu_temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "gpu_throttle": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
}


class GpuReader:
    """Reads GPUs with NVML: CUDA is not initialized, and no memory of the GPU is used."""

    _nvml: Any = None

    def read(self, name: str, metrics: Iterable[str] = tuple(_MEASURES)) -> dict[str, float]:
        """Return the metrics that a GPU can measure (a MIG instance has no utilization); {} without NVML.

        `name` is an entry of CUDA_VISIBLE_DEVICES: an index or a UUID.
        """
        try:
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            nvml = self._nvml
            by_index = name.isdigit()
            gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
        except Exception:  # no driver, no such GPU, or no nvidia-ml-py, whose exceptions then do not exist
            return {}
        values: dict[str, float] = {}
        for metric in metrics:
            with suppress(Exception):  # this GPU or its driver does not support it
                values[metric] = float(_MEASURES[metric](nvml, gpu))
        return values


# --- out of memory ---


class MemoryWatch:
    """Made when a rank starts; after SIGKILL, finds out whether the kernel has killed the rank for its memory.

    The kernel counts such kills in a file of the rank's control group, and version 2 those of the groups below it, too.
    """

    def __init__(self, pid: int, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._events, self._limit, self._groups = _counters(text_or_empty(proc / str(pid) / "cgroup"), root)
        self._kills = self._oom_kills()

    def explain_kill(self) -> str:
        """Return why the kernel ended the rank; "" if it was not for its memory."""
        if self._oom_kills() == self._kills:
            return ""
        limits = [text_or_empty(folder / self._limit).strip() for folder in self._groups]
        limit = min((int(text) for text in limits if text.isdigit() and int(text) < 1 << 62), default=None)
        if limit is None:
            return "out of memory (the host's)"
        return f"out of memory (the memory limit of {limit / (1 << 30):.1f} GiB of its control group)"

    def _oom_kills(self) -> str:
        lines = text_or_empty(self._groups[0] / self._events).splitlines() if self._groups else []
        return next((line for line in lines if line.startswith("oom_kill ")), "")


@cache  # the ranks of a worker are in one group
def _counters(groups: str, root: Path) -> tuple[str, str, list[Path]]:
    """Return the files with the number of kills and with the limit, and the folders that have them: the group's first.

    groups: the text of /proc/PID/cgroup.
    """
    events, limit, folders = "memory.events", "memory.max", list[Path]()
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        if controllers:  # version 1
            events, limit = "memory.oom_control", "memory.limit_in_bytes"
        group = top / path.lstrip("/")
        above = [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
        folders += [folder for folder in above if (folder / events).exists()]
    return events, limit, folders
