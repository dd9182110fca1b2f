"""What the system metrics show about a slow rank."""

from __future__ import annotations

import pytest

from ddptrain.driver.failure.slow_causes import RankUse, causes

HOST = {"cores": 8.0, "cpu_percent": 25.0, "memory_bytes": 1.0, "memory_total_bytes": 100.0}
RANK = {"cpu_percent": 100.0, "cpu_wait_percent": 1.0, "gpu_clock_mhz": 1980.0, "gpu_processes": 1.0}


def of(rank: dict[str, float], host: dict[str, float] | None = None) -> list[str]:
    """The causes of rank 1 of three, which has these values besides the usual ones."""
    slow = RankUse({**RANK, **rank}, {**HOST, **(host or {})}, "h1")
    return causes(1, [RankUse(RANK, HOST, "h0"), slow, RankUse(RANK, HOST, "h0")])


def test_usual_values_are_no_cause() -> None:
    assert of({}) == []


def test_nothing_is_known_before_the_first_sample() -> None:
    assert causes(0, [RankUse({}, {}), RankUse({}, {})]) == []


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        ({"gpu_throttle": 0x40, "gpu_temperature_c": 91.0}, "reduces its clock at 91 °C: hardware thermal slowdown"),
        ({"gpu_clock_mhz": 1200.0}, "its GPU runs at 1200 MHz, others at 1980 MHz"),
        ({"gpu_processes": 2.0}, "2 processes use its GPU"),
        ({"gpu_memory_bytes": 97.0, "gpu_memory_total_bytes": 100.0}, "the memory of its GPU is 97% full"),
        ({"gpu_ecc_errors": 3.0}, "its GPU had 3 memory errors"),
        ({"cpu_wait_percent": 48.2}, "it waited for a core 48 % of the time: other processes use 1.0 of 8 cores"),
        ({"cpu_percent": 40.0}, "it uses 40 % of a core, and other processes of its host 1.6 cores"),
    ],
)
def test_cause_of_a_rank(rank: dict[str, float], text: str) -> None:
    (cause,) = of(rank)
    assert text in cause


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ({"memory_bytes": 96.0}, "the memory of its host is 96% full"),
        ({"shm_bytes": 1.0, "shm_total_bytes": 1.0}, "shared memory (/dev/shm) of its host is 100% full"),
        ({"disk_bytes": 99.0, "disk_total_bytes": 100.0}, "the disk of its host is 99% full"),
        ({"iowait_percent": 30.0}, "the cores of its host wait for disks 30 % of the time"),
    ],
)
def test_cause_of_a_host(host: dict[str, float], text: str) -> None:
    assert text in of({}, host)


def test_idle_gpu_and_a_clock_that_the_user_has_set_are_no_throttling() -> None:
    assert of({"gpu_throttle": 0x1 | 0x2 | 0x10}) == []


def test_wait_for_a_core_that_all_ranks_share_is_no_cause_of_one() -> None:
    busy = RankUse({"cpu_percent": 60.0, "cpu_wait_percent": 40.0}, HOST, "h0")
    assert causes(0, [busy, busy]) == []


def test_cores_of_other_processes_are_what_the_ranks_of_the_host_do_not_use() -> None:
    host = {"cores": 64.0, "cpu_percent": 75.0}
    waits = RankUse({"cpu_percent": 100.0, "cpu_wait_percent": 50.0}, host, "h1")
    elsewhere = RankUse({"cpu_percent": 100.0}, host, "h0")
    text = "it waited for a core 50 % of the time: other processes use 47.0 of 64 cores of its host"
    assert causes(0, [waits, elsewhere, elsewhere]) == [text]


@pytest.mark.parametrize(
    ("rank", "host", "found"),
    [
        ({"cpu_wait_percent": 14.9}, {}, []),
        ({"cpu_wait_percent": 15.0}, {"cpu_percent": 0.0}, ["it waited for a core 15 % of the time"]),
        ({"cpu_wait_percent": 240.0}, {"cpu_percent": 18.6}, ["it waited for a core 100 % of the time"]),
        (
            {"cpu_wait_percent": 15.0},
            {"cpu_percent": 18.75},
            ["it waited for a core 15 % of the time: other processes use 0.5 of 8 cores of its host"],
        ),
        ({"cpu_percent": 50.0}, {}, []),
        ({"cpu_percent": 49.0}, {"cpu_percent": 12.3}, []),  # the others use less than half a core
        (
            {"cpu_percent": 49.0},
            {"cpu_percent": 12.375},
            ["it uses 49 % of a core, and other processes of its host 0.5 cores"],
        ),
        ({"gpu_clock_mhz": 1683.0}, {}, []),
        ({"gpu_clock_mhz": 1682.0}, {}, ["its GPU runs at 1682 MHz, others at 1980 MHz"]),
        ({"gpu_throttle": 0x40}, {}, ["its GPU reduces its clock: hardware thermal slowdown"]),
        ({"gpu_memory_bytes": 94.9, "gpu_memory_total_bytes": 100.0}, {}, []),
        ({"gpu_memory_bytes": 95.0, "gpu_memory_total_bytes": 100.0}, {}, ["the memory of its GPU is 95% full"]),
        ({"gpu_memory_bytes": 95.0}, {}, []),
        ({"gpu_memory_total_bytes": 1.0}, {}, []),
        ({}, {"memory_bytes": 94.9}, []),
        ({}, {"iowait_percent": 19.9}, []),
        ({}, {"iowait_percent": 20.0}, ["the cores of its host wait for disks 20 % of the time"]),
    ],
)
def test_limits_of_each_cause(rank: dict[str, float], host: dict[str, float], found: list[str]) -> None:
    assert of(rank, host) == found


@pytest.mark.parametrize(("waited", "count"), [(29.9, 0), (30.0, 1)])
def test_wait_for_a_core_is_a_cause_if_it_is_half_as_long_again_as_that_of_the_others(
    waited: float, count: int
) -> None:
    others = RankUse({"cpu_wait_percent": 20.0}, {})
    assert len(causes(0, [RankUse({"cpu_wait_percent": waited}, {}), others, others])) == count


def test_rank_whose_cpu_use_is_not_known_counts_for_nothing() -> None:
    host = {"cores": 2.0, "cpu_percent": 100.0}
    unknown, slow = RankUse({}, host, "h"), RankUse({"cpu_percent": 40.0}, host, "h")
    busy = RankUse({"cpu_percent": 90.0}, {}, "i")
    text = "it uses 40 % of a core, and other processes of its host 1.6 cores"
    assert causes(0, [unknown, busy]) == []
    assert causes(0, [slow, busy]) == []  # the median of two is the lower one
    assert causes(0, [slow, busy, busy, unknown]) == [text]
