"""Finds likely causes of a slow rank in the system metrics: throttling, full memory, disk, another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from ddptrain.protocol.system_metrics import throttle_reasons

_FULL = 0.95  # of a memory or a file system
_CORE_WAIT_PERCENT = 15.0
_MORE_WAIT = 1.5  # times the median of the ranks
_IOWAIT_PERCENT = 20.0
_SLOW_CLOCK = 0.85  # of the median clock of the ranks
_OTHER_CORES = 0.5
_LOW_USE = 0.5  # of the median CPU use

Use = Mapping[str, float]


class RankUse(NamedTuple):
    """The newest system metrics of a rank and of its host, and the host's name; empty before the first sample."""

    rank: Use
    host: Use
    name: str = ""


def causes(slow: int, uses: Sequence[RankUse]) -> list[str]:
    """Return texts with the likely causes why the rank `slow` is slow; `uses` are the metrics of all ranks."""
    use = uses[slow]
    return [*_of_gpu(use.rank, [each.rank for each in uses]), *_of_cpu(use, uses), *_of_host(use.host)]


def _of_gpu(rank: Use, every: Sequence[Use]) -> list[str]:
    causes = []
    if reasons := throttle_reasons(rank.get("gpu_throttle", 0.0)):
        temperature = f" at {rank['gpu_temperature_c']:.0f} °C" if "gpu_temperature_c" in rank else ""
        causes.append(f"its GPU reduces its clock{temperature}: {', '.join(reasons)}")
    clock, clocks = rank.get("gpu_clock_mhz"), [use["gpu_clock_mhz"] for use in every if "gpu_clock_mhz" in use]
    if clock is not None and clock < _SLOW_CLOCK * (middle := median_low(clocks)):
        causes.append(f"its GPU runs at {clock:.0f} MHz, others at {middle:.0f} MHz")
    if (count := rank.get("gpu_processes", 0.0)) > 1:
        causes.append(f"{count:.0f} processes use its GPU")
    if _is_full(rank, "gpu_memory"):
        causes.append(f"the memory of its GPU is {_share(rank, 'gpu_memory'):.0%} full")
    if errors := rank.get("gpu_ecc_errors", 0.0):
        causes.append(f"its GPU had {errors:.0f} memory errors")
    return causes


def _of_cpu(use: RankUse, every: Sequence[RankUse]) -> list[str]:
    waited, others = use.rank.get("cpu_wait_percent", 0.0), _other_cores(use, every)
    waits = median_low(each.rank.get("cpu_wait_percent", 0.0) for each in every)
    if waited >= max(_CORE_WAIT_PERCENT, _MORE_WAIT * waits):
        text = f"it waited for a core {min(waited, 100.0):.0f} % of the time"
        if others >= _OTHER_CORES:
            text += f": other processes use {others:.1f} of {use.host.get('cores', 0.0):.0f} cores of its host"
        return [text]
    used = [each.rank["cpu_percent"] for each in every if "cpu_percent" in each.rank]
    percent = use.rank.get("cpu_percent")
    if percent is not None and others >= _OTHER_CORES and percent < _LOW_USE * median_low(used):
        return [f"it uses {percent:.0f} % of a core, and other processes of its host {others:.1f} cores"]
    return []


def _other_cores(use: RankUse, every: Sequence[RankUse]) -> float:
    """Return the number of the host's cores that processes other than ranks use."""
    ranks = sum(each.rank.get("cpu_percent", 0.0) for each in every if each.name == use.name)
    return max(0.0, use.host.get("cores", 0.0) * use.host.get("cpu_percent", 0.0) - ranks) / 100


def _of_host(host: Use) -> list[str]:
    parts = {"memory": "the memory", "shm": "shared memory (/dev/shm)", "disk": "the disk"}
    full = [name for name in parts if _is_full(host, name)]
    causes = [f"{parts[name]} of its host is {_share(host, name):.0%} full" for name in full]
    if (waited := host.get("iowait_percent", 0.0)) >= _IOWAIT_PERCENT:
        causes.append(f"the cores of its host wait for disks {waited:.0f} % of the time")
    return causes


def _share(use: Use, name: str) -> float:
    total = use.get(f"{name}_total_bytes", 0.0)
    return use.get(f"{name}_bytes", 0.0) / total if total else 0.0


def _is_full(use: Use, name: str) -> bool:
    return _share(use, name) >= _FULL
