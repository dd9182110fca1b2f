"""Measures a host, its ranks and their GPUs."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from ddptrain.protocol.news import MAX_SAMPLED_RANKS, SystemSample

SYSTEM_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class SampledRank:
    """A rank to sample: `pid` leads its process group, `gpu` is an entry of CUDA_VISIBLE_DEVICES or None."""

    rank: int
    pid: int
    gpu: str | None


class SystemSampler:
    """Measures the host, and ranks on it. Rates are those since the last call, for the host since its creation."""

    def __init__(self) -> None:
        self._host = Rates()
        self._host.of(_host_counters(), time.monotonic())
        self._ranks: dict[int, Rates] = defaultdict(Rates)
        self._gpus = GpuReader()

    def samples(self, ranks: Sequence[SampledRank]) -> Iterator[SystemSample]:
        """Yield the use of the host with that of up to MAX_SAMPLED_RANKS ranks each; nothing if all have ended."""
        groups = members(rank.pid for rank in ranks)
        now, time_ns = time.monotonic(), time.time_ns()
        uses: dict[int, Mapping[str, float]] = {}
        for rank in ranks:
            if use := rank_use(groups[rank.pid], self._ranks[rank.rank], now):
                gpu = self._gpus.read(rank.gpu) if rank.gpu is not None else {}
                uses[rank.rank] = _rounded(use | gpu)
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
            try:
                group = os.getpgid(int(name))
            except OSError:
                continue  # the process has ended
            if group in pids:
                pids[group].append(int(name))
    return pids


def rank_use(pids: Iterable[int], rates: Rates, now: float) -> dict[str, float]:
    """Return the metrics of a rank with these processes; {} if all have ended."""
    cpu_s, rss_bytes, processes = 0.0, 0, 0
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            cpu_s += sum(process.cpu_times()[:4])  # with ended children
            rss_bytes += process.memory_info().rss
            processes += 1
    if not processes:
        return {}
    used = {"rss_bytes": float(rss_bytes), "processes": float(processes)}
    return used | rates.of({"cpu_percent": 100 * cpu_s}, now)


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
    """Reads GPUs with NVML: CUDA is not initialized, and no memory of the GPU is used.

    A metric that a GPU cannot measure (a MIG instance has no utilization) is not requested again.
    """

    def __init__(self, nvml: Any = None) -> None:
        """`nvml`: the module to use, for tests; by default that of nvidia-ml-py, if there is an NVIDIA driver."""
        self._nvml = nvml
        self._refused: dict[str, set[str]] = {}

    def read(self, name: str, metrics: Iterable[str] = tuple(_MEASURES)) -> dict[str, float]:
        """Return the metrics of a GPU; {} without NVML.

        `name` is an entry of CUDA_VISIBLE_DEVICES: an index or a UUID.
        """
        try:
            nvml = self._nvml or _nvml()
        except Exception:  # no driver, or no nvidia-ml-py, whose exceptions then do not exist
            return {}
        values: dict[str, float] = {}
        refused = self._refused.setdefault(name, set())
        lasting = nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission
        with suppress(nvml.NVMLError):
            by_index = name.isdigit()
            gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
            for metric in set(metrics) - refused:
                try:
                    values[metric] = float(_MEASURES[metric](nvml, gpu))
                except Exception as error:  # nvidia-ml-py has an error of another class for drivers that are too old
                    if isinstance(error, lasting) or not isinstance(error, nvml.NVMLError):
                        refused.add(metric)
        return values

    def percent(self, name: str) -> int | None:
        """Return the utilization of a GPU in percent; None without a driver, or for a MIG instance."""
        percent = self.read(name, ("gpu_percent",)).get("gpu_percent")
        return int(percent) if percent is not None else None


@functools.cache
def _nvml() -> Any:
    """Return the initialized NVML, which stays open until the process ends. Raises NVMLError, ImportError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml
