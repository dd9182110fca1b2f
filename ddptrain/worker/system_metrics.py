"""Measures a host, its ranks and their GPUs in one thread of the worker, and sends one message for each run."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from ddptrain.log import Log
from ddptrain.protocol.worker_notices import MAX_SAMPLED_RANKS, SystemSample

SYSTEM_EVERY_S = 5.0
_FIRST_S = 1.0  # from the start of a run's ranks to their first sample, so that short runs have one
_log = Log(__name__)

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
    """When the next sample of a run is due (monotonic), the interval in seconds, and the rates of the host."""

    due: float
    every_s: float
    rates: Rates


class SystemSampler:
    """Samples the host while it has ranks; the thread ends with the last rank."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._ranks: dict[str, tuple[SampledRank, Rates]] = {}  # by the key of the rank's task
        self._runs: dict[tuple[str, int], _RunClock] = {}  # by run and attempt
        self._gpus = GpuReader()
        self._thread: threading.Thread | None = None

    def add(self, key: str, rank: SampledRank) -> None:
        """Sample a rank from now on."""
        with self._lock:
            self._ranks[key] = rank, Rates()
            run = rank.run_id, rank.attempt
            if run not in self._runs:
                due = time.monotonic() + min(_FIRST_S, rank.every_s)
                rates = Rates()
                rates.of(_host_counters(), time.monotonic())
                self._runs[run] = _RunClock(due, rank.every_s, rates)
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
                for send, sample in self._samples(ranks, clock.rates):
                    send(sample)
            except Exception as error:  # unexpected values of /proc and NVML must not affect the ranks
                _log.warning("system metrics not sampled", run=run[0], error=f"{type(error).__name__}: {error}")

    def _samples(self, ranks: list[tuple[SampledRank, Rates]], host: Rates) -> Iterator[tuple[Send, SystemSample]]:
        groups = members(rank.pid for rank, _ in ranks)
        now, time_ns = time.monotonic(), time.time_ns()
        uses: dict[int, Mapping[str, float]] = {}
        for rank, rates in ranks:
            if use := rank_use(groups[rank.pid], rates, now):
                gpu = self._gpus.read(rank.gpu) if rank.gpu is not None else {}
                uses[rank.rank] = _rounded(use | gpu)
        if not uses:
            return
        first = ranks[0][0]
        use_of_host, numbers = _rounded(_host_use(host, now)), sorted(uses)
        for start in range(0, len(numbers), MAX_SAMPLED_RANKS):
            part = numbers[start : start + MAX_SAMPLED_RANKS]
            selected = {str(rank): uses[rank] for rank in part}
            yield first.send, SystemSample(first.attempt, part[0], time_ns, socket.gethostname(), use_of_host, selected)


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
