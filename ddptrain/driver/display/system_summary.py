"""The use of all hosts and GPUs of a run in a few words, for the live display."""

from __future__ import annotations

from collections.abc import Mapping

from ddptrain.protocol.worker_notices import SystemSample

_GB = 1e9


class SystemSummary:
    """Keeps the newest sample of each host and rank."""

    def __init__(self) -> None:
        self._hosts: dict[str, Mapping[str, float]] = {}
        self._ranks: dict[str, Mapping[str, float]] = {}

    def add(self, sample: SystemSample) -> None:
        """Take a sample in."""
        self._hosts[sample.host] = sample.use
        self._ranks |= sample.ranks

    def facts(self) -> list[str]:
        """As "GPU 93 % 61/80 GB 71 °C", "CPU 45 %", "memory 12/64 GB": means of use, and the fullest and hottest."""
        found = []
        gpus = [use for use in self._ranks.values() if "gpu_memory_bytes" in use]
        if gpus:
            percent = [use["gpu_percent"] for use in gpus if "gpu_percent" in use]
            heat = [use["gpu_temperature_c"] for use in gpus if "gpu_temperature_c" in use]
            words = ["GPU"] + ([f"{sum(percent) / len(percent):.0f} %"] if percent else [])
            words += [_fullest(gpus, "gpu_memory")] + ([f"{max(heat):.0f} °C"] if heat else [])
            found.append(" ".join(filter(None, words)))
        hosts = [*self._hosts.values()]
        if busy := [use["cpu_percent"] for use in hosts if "cpu_percent" in use]:
            found.append(f"CPU {sum(busy) / len(busy):.0f} %")
        if memory := _fullest(hosts, "memory"):
            found.append(f"memory {memory}")
        return found


def _fullest(uses: list[Mapping[str, float]], name: str) -> str:
    """Used and total gigabytes of the fullest one; "" if none is known."""
    known = [(use[f"{name}_bytes"], use[f"{name}_total_bytes"]) for use in uses if use.get(f"{name}_total_bytes")]
    if not known:
        return ""
    used, total = max(known, key=lambda pair: pair[0] / pair[1])
    return f"{_gigabytes(used)}/{_gigabytes(total)} GB"


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / _GB:.0f}" if size_bytes >= 10 * _GB else f"{size_bytes / _GB:.1f}"
