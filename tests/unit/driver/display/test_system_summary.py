"""The use of hosts and GPUs in a few words."""

from __future__ import annotations

from ddptrain.driver.display.system_summary import SystemSummary
from ddptrain.protocol.worker_notices import SystemSample


def test_nothing_is_shown_before_the_first_sample() -> None:
    assert SystemSummary().facts() == []


def test_means_of_use_and_the_fullest_and_hottest() -> None:
    summary = SystemSummary()
    for host, percent, used in (("a", 20.0, 12e9), ("b", 40.0, 32e9)):
        gpu = {"gpu_percent": percent * 2, "gpu_memory_bytes": used, "gpu_memory_total_bytes": 80e9}
        use = {"cpu_percent": percent, "memory_bytes": used, "memory_total_bytes": 64e9}
        summary.add(SystemSample(1, 0, 1, host, use, {host: {**gpu, "gpu_temperature_c": percent + 30}}))
    assert summary.facts() == ["GPU 60 % 32/80 GB 70 °C", "CPU 30 %", "memory 32/64 GB"]


def test_newest_sample_of_a_host_counts() -> None:
    summary = SystemSummary()
    for percent in (10.0, 90.0):
        summary.add(SystemSample(1, 0, 1, "a", {"cpu_percent": percent}, {}))
    assert summary.facts() == ["CPU 90 %"]
