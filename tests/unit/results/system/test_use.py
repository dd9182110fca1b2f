"""The use of hosts and GPUs in a few words."""

from __future__ import annotations

from ddptrain.protocol.worker_notices import SystemSample
from ddptrain.results.system import SystemSummary


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


def test_numbers_that_are_not_known_are_left_out() -> None:
    summary = SystemSummary()
    summary.add(
        SystemSample(1, 0, 1, "a", {"memory_bytes": 5e9, "memory_total_bytes": 0.0}, {"0": {"cpu_percent": 1.0}})
    )
    assert summary.facts() == []
    summary.add(SystemSample(1, 0, 1, "a", {}, {"1": {"gpu_memory_bytes": 1e9}}))
    assert summary.facts() == ["GPU"]


def test_fullest_memory_is_the_one_with_the_largest_part_in_use() -> None:
    summary = SystemSummary()
    for host, used, total in (("a", 32e9, 80e9), ("b", 9.94e9, 16e9), ("c", 10e9, 40e9)):
        summary.add(SystemSample(1, 0, 1, host, {"memory_bytes": used, "memory_total_bytes": total}, {}))
    assert summary.facts() == ["memory 9.9/16 GB"]
    summary.add(SystemSample(1, 0, 1, "b", {"memory_bytes": 10e9, "memory_total_bytes": 16e9}, {}))
    assert summary.facts() == ["memory 10/16 GB"]
