"""Facts of hosts that are wrong are found, with the values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ddptrain.driver.cluster_check.findings import Level
from ddptrain.driver.cluster_check.judge_facts import judge_facts
from ddptrain.driver.cluster_check.readings import ClockOffset, HostReading
from tests.unit.driver.cluster_check.hosts import GPU, VERSIONS, host


def judged(*hosts: HostReading, ranks: int = 8) -> list[tuple[str, str, str, str]]:
    return [(str(each.level), each.host, each.subject, each.text) for each in judge_facts(hosts, ranks)]


def three(**changes: Any) -> tuple[HostReading, ...]:
    return host("a"), host("b"), host("c", **changes)


def test_nothing_is_found_on_sound_hosts() -> None:
    assert judged(*three()) == []


@pytest.mark.parametrize(
    ("changes", "level", "subject", "text"),
    [
        ({"open_files": 256}, "bad", "open files", "a process may open 256 files; 8 ranks need about 288"),
        ({"open_files": 1000}, "warning", "open files", "a process may open 1000 files; 8 ranks need about 288"),
        ({"shm_mb": 64, "shm_free_mb": 64}, "bad", "shm", "64 MB of 64 MB are free in /dev/shm"),
        ({"shm_free_mb": 900}, "warning", "shm", "900 MB of 32000 MB are free in /dev/shm"),
        ({"scratch_free_mb": 12}, "bad", "disk", "12 MB of 1000000 MB are free in /scratch"),
        ({"scratch_free_mb": 9_999}, "warning", "disk", "9999 MB of 1000000 MB are free in /scratch"),
        ({"scratch_write_mb_s": 100.0}, "bad", "disk", "100 MB/s written, 10 % of the median of 3 (1e+03)"),
        ({"memory_free_mb": 6_000}, "warning", "memory", "6000 MB of 64000 MB are available"),
        ({"problems": ("no file can be written",)}, "bad", "reading", "no file can be written"),
        ({"cores": 8}, "warning", "cores", "8, most hosts have 16"),
        ({"versions": {**VERSIONS, "torch": "2.8.0"}}, "bad", "versions", "torch 2.8.0, most hosts have 2.9.0"),
        (
            {"versions": {**VERSIONS, "driver": "580.1"}},
            "warning",
            "versions",
            "driver 580.1, most hosts have none",
        ),
        ({"clock": ClockOffset(-2.5, 0.01)}, "bad", "clock", "the clock is 2.50 s behind the driver's"),
        ({"clock": ClockOffset(0.3, 0.01)}, "warning", "clock", "the clock is 0.30 s ahead of the driver's"),
        ({"error": "it does not answer within 10 s"}, "bad", "answer", "it does not answer within 10 s"),
    ],
)
def test_fault_of_one_host_is_named(changes: dict[str, Any], level: str, subject: str, text: str) -> None:
    assert judged(*three(**changes)) == [(level, "c", subject, text)]


def test_clock_is_not_blamed_for_a_slow_answer() -> None:
    assert judged(host("a", clock=ClockOffset(3.0, 2.95))) == []


def test_patch_version_of_python_does_not_matter() -> None:
    assert judged(*three(versions={**VERSIONS, "python": "3.11.9"})) == []


def test_two_hosts_with_different_versions_are_both_named() -> None:
    (found,) = judge_facts([host("a"), host("b", versions={**VERSIONS, "torch": "2.8.0"})], 2)
    assert (found.level, found.host) == (Level.BAD, "")
    assert found.text == "torch: 2.9.0 on a, 2.8.0 on b"


@pytest.mark.parametrize(
    ("changes", "level", "subject", "text"),
    [
        ({"ecc_errors": 2}, "bad", "ECC", "has 2 uncorrected memory errors since its driver was loaded"),
        ({"remap_pending": True}, "bad", "ECC", "waits for a reset to replace bad memory rows"),
        ({"throttled": ("hardware slowdown",)}, "bad", "throttling", "reduces its clocks: hardware slowdown"),
        ({"temperature_c": 93}, "warning", "temperature", "has 93 degrees Celsius"),
        ({"memory_used_mb": 9_000}, "warning", "GPU memory", "9000 MB of 80000 MB"),
        ({"pcie_width": 4}, "warning", "PCIe", "uses 4 of 16 PCIe lanes"),
    ],
)
def test_fault_of_a_gpu_is_named(changes: dict[str, Any], level: str, subject: str, text: str) -> None:
    ((found_level, _, found_subject, found_text),) = judged(host("a", gpus=(dataclasses.replace(GPU, **changes),)))
    assert (found_level, found_subject) == (level, subject)
    assert text in found_text and "GPU 0 (NVIDIA H100)" in found_text


def test_host_that_has_lost_a_gpu_or_links_is_named() -> None:
    full, linked = (GPU, GPU), (dataclasses.replace(GPU, nvlinks=18),)
    hosts = host("a", gpus=full), host("b", gpus=full), host("c", gpus=(GPU,))
    assert judged(*hosts) == [("bad", "c", "GPUs", "1 x NVIDIA H100, most hosts have 2 x NVIDIA H100")]
    hosts = host("a", gpus=linked), host("b", gpus=linked), host("c", gpus=(GPU,))
    assert judged(*hosts) == [("bad", "c", "NVLink", "0, most hosts have 18")]


@pytest.mark.parametrize(("used_mb", "is_found"), [(4_000, False), (4_001, True)])
def test_gpu_memory_may_be_used_up_to_a_twentieth(used_mb: int, is_found: bool) -> None:
    assert bool(judged(host("a", gpus=(dataclasses.replace(GPU, memory_used_mb=used_mb),)))) == is_found


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({"memory_free_mb": 6_400}, 8, []),
        ({"memory_free_mb": 6_399}, 8, ["warning"]),
        ({"shm_free_mb": 1_000}, 8, []),
        ({"shm_free_mb": 999}, 8, ["warning"]),
        ({"shm_free_mb": 100}, 8, ["warning"]),
        ({"shm_free_mb": 99}, 8, ["bad"]),
        ({"shm_mb": 0, "shm_free_mb": 0}, 8, []),
        ({"shm_mb": 1, "shm_free_mb": 0}, 8, ["bad"]),
        ({"scratch_free_mb": 10_000}, 8, []),
        ({"scratch_free_mb": 9_999}, 8, ["warning"]),
        ({"scratch_free_mb": 1_000}, 8, ["warning"]),
        ({"scratch_free_mb": 999}, 8, ["bad"]),
        ({"scratch_mb": 0, "scratch_free_mb": 0}, 8, []),
        ({"scratch_write_mb_s": 20.0}, 8, []),
        ({"scratch_write_mb_s": 19.9}, 8, ["warning"]),
        ({"scratch_write_mb_s": None}, 8, []),
        ({"open_files": 1_024}, 8, []),
        ({"open_files": 1_023}, 8, ["warning"]),
        ({"open_files": 288}, 8, ["warning"]),
        ({"open_files": 287}, 8, ["bad"]),
        ({"open_files": 0}, 8, ["bad"]),
        ({"open_files": -1}, 8, []),
        ({"open_files": 1_456}, 300, []),
        ({"open_files": 1_455}, 300, ["bad"]),
        ({"clock": ClockOffset(0.1, 0.0)}, 8, []),
        ({"clock": ClockOffset(-0.11, 0.0)}, 8, ["warning"]),
        ({"clock": ClockOffset(-1.0, 0.0)}, 8, ["warning"]),
        ({"clock": ClockOffset(1.01, 0.0)}, 8, ["bad"]),
        ({"gpus": (dataclasses.replace(GPU, temperature_c=89),)}, 8, []),
        ({"gpus": (dataclasses.replace(GPU, temperature_c=90),)}, 8, ["warning"]),
        ({"gpus": (dataclasses.replace(GPU, pcie_width=15),)}, 8, ["warning"]),
        ({"gpus": (dataclasses.replace(GPU, pcie_width=None),)}, 8, []),
        ({"gpus": (dataclasses.replace(GPU, pcie_width=8, pcie_width_max=None),)}, 8, []),
        ({"gpus": (dataclasses.replace(GPU, ecc_errors=None),)}, 8, []),
    ],
)
def test_values_at_their_limit_are_fine(changes: dict[str, Any], ranks: int, expected: list[str]) -> None:
    assert [level for level, *_ in judged(host("a", **changes), ranks=ranks)] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory_mb": 44_800, "memory_free_mb": 44_800}, []),
        (
            {"memory_mb": 44_799, "memory_free_mb": 44_799},
            [("warning", "memory", "4.48e+04 MB, 70 % of the median of 3 (6.4e+04)")],
        ),
        (
            {"memory_mb": 100, "memory_free_mb": 100},
            [("warning", "memory", "100 MB, 0 % of the median of 3 (6.4e+04)")],
        ),
        ({"scratch_write_mb_s": 500.0}, []),
        ({"scratch_write_mb_s": 499.0}, [("warning", "disk", "499 MB/s written, 50 % of the median of 3 (1e+03)")]),
        ({"scratch_write_mb_s": 200.0}, [("warning", "disk", "200 MB/s written, 20 % of the median of 3 (1e+03)")]),
        ({"scratch_write_mb_s": 199.0}, [("bad", "disk", "199 MB/s written, 20 % of the median of 3 (1e+03)")]),
        ({"versions": {**VERSIONS, "distributed": "2026.8.9"}}, []),
        (
            {"versions": {**VERSIONS, "distributed": "2026.9.0"}},
            [("warning", "versions", "distributed 2026.9, most hosts have 2026.8")],
        ),
        ({"versions": {**VERSIONS, "python": "3.12.7"}}, [("bad", "versions", "python 3.12, most hosts have 3.11")]),
        (
            {"versions": {name: value for name, value in VERSIONS.items() if name != "ddptrain"}},
            [("bad", "versions", "ddptrain is missing, most hosts have 0.1.0")],
        ),
    ],
)
def test_host_is_compared_with_the_others(changes: dict[str, Any], expected: list[tuple[str, str, str]]) -> None:
    assert [(level, subject, text) for level, _, subject, text in judged(*three(**changes))] == expected


def test_package_that_one_of_two_hosts_lacks_is_named() -> None:
    found = judged(host("a"), host("b", versions={**VERSIONS, "driver": "580.1"}))
    assert found == [("warning", "", "versions", "driver: none on a, 580.1 on b")]


def test_links_of_a_host_are_those_of_the_gpu_that_has_the_fewest() -> None:
    full = (dataclasses.replace(GPU, nvlinks=18), dataclasses.replace(GPU, nvlinks=17))
    less = (dataclasses.replace(GPU, nvlinks=18), dataclasses.replace(GPU, nvlinks=4))
    assert judged(host("a", gpus=full), host("b", gpus=full), host("c", gpus=less)) == [
        ("bad", "c", "NVLink", "4, most hosts have 17")
    ]


def test_gpus_of_a_host_are_counted_by_their_name() -> None:
    mixed = (GPU, dataclasses.replace(GPU, name="T4"), GPU)
    found = judged(host("a", gpus=mixed), host("b", gpus=mixed), host("c"))
    assert found == [("bad", "c", "GPUs", "no GPU, most hosts have 2 x NVIDIA H100 and 1 x T4")]
