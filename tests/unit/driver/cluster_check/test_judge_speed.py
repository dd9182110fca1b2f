"""Slow hosts, GPUs and pairs are named, and nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddptrain.driver.cluster_check.findings import Level
from ddptrain.driver.cluster_check.judge_speed import judge_speed
from ddptrain.driver.cluster_check.readings import HostReading, Readings, better_of, pairs_of
from ddptrain.protocol.cluster_check import WAITED, ProbeLine
from tests.unit.driver.cluster_check.hosts import ETH0, host, pair, rank


def readings(*hosts: HostReading, **more: Any) -> Readings:
    return Readings(hosts, pairs_of(hosts), **more)


def measured(speeds: dict[tuple[int, int], float], hosts: int, **changes: Any) -> Readings:
    """Hosts a, b, ... whose pairs have these speeds in GB/s."""

    def lines(node: int) -> list[ProbeLine]:
        return [pair(sum(key) - node, speed) for key, speed in speeds.items() if node in key]

    return readings(*(host("abcdefgh"[node], rank(node, *lines(node)), **changes) for node in range(hosts)))


def test_equal_hosts_are_fine() -> None:
    assert judge_speed(measured({(0, 1): 1.0, (0, 2): 0.9, (1, 2): 1.1}, 3)) == []


def test_slow_interface_of_one_host_is_named_with_interface_and_hint() -> None:
    (found,) = judge_speed(measured({(0, 1): 1.0, (0, 2): 0.1, (1, 2): 0.1}, 3))
    assert (found.level, found.host, found.other) == (Level.BAD, "c", "")
    assert found.text == "all-reduce with other hosts over eth0, 10 Gbit/s: 0.1 GB/s, 10 % of the median of 3 (1)"
    assert "ethtool eth0" in found.hint


def test_slow_pair_of_good_hosts_is_named_as_a_pair() -> None:
    speeds = {(a, b): 2.0 for a in range(4) for b in range(a + 1, 4)}
    (found,) = judge_speed(measured({**speeds, (1, 3): 0.6}, 4))
    assert (found.host, found.other) == ("b", "d")
    assert "between b (eth0, 10 Gbit/s) and d (eth0, 10 Gbit/s): all-reduce: 0.6 GB/s, 30 % of the median" in found.text


def test_two_hosts_are_compared_with_their_interfaces() -> None:
    (found,) = judge_speed(measured({(0, 1): 0.006}, 2))
    assert (found.level, found.host, found.other) == (Level.BAD, "a", "b")
    assert "0.006 GB/s (0.048 Gbit/s); the interfaces promise 10 Gbit/s" in found.text
    assert judge_speed(measured({(0, 1): 0.5}, 2)) == []


def test_very_slow_network_is_bad_also_if_the_speed_of_the_interface_is_not_known() -> None:
    unknown = ETH0.__class__("eth0", ETH0.addresses, 0, 1500, True)
    (found,) = judge_speed(measured({(0, 1): 0.006}, 2, interfaces=(unknown,)))
    assert found.level is Level.BAD and "promise" not in found.text


def test_slow_gpu_is_named_by_its_device() -> None:
    hosts = [host(name, rank(0, gflops=100.0, device="0"), rank(1, gflops=100.0, device="1")) for name in "ab"]
    slow = host("c", rank(0, gflops=100.0, device="0"), rank(1, gflops=60.0, device="1"))
    (found,) = judge_speed(readings(*hosts, slow))
    assert (found.level, found.host, found.subject) == (Level.BAD, "c", "gemm")
    assert found.text == "GPU 1: 60 GFLOP/s, 60 % of the median of 6 (100)"


def test_throttling_under_load_is_named() -> None:
    gemm = ProbeLine("gemm", "done", values={"gflops": 1.0}, text="hardware thermal slowdown")
    (found,) = judge_speed(readings(host("a", rank(0).__class__(0, (gemm,), "3"))))
    assert found.text == "GPU 3 reduces its clocks under load: hardware thermal slowdown"


def test_host_that_nobody_reaches_is_named_and_the_others_are_not() -> None:
    def failed(peer: int) -> ProbeLine:
        return ProbeLine("pair", "failed", peer, text="connection timed out")

    hosts = (
        host("a", rank(0, pair(1, 1.0), failed(2))),
        host("b", rank(1, pair(0, 1.0), failed(2))),
        host("c", rank(2, failed(0), failed(1))),
    )
    (found,) = judge_speed(readings(*hosts))
    assert (found.level, found.host) == (Level.BAD, "c")
    assert found.text == "no all-reduce with a, b over eth0, 10 Gbit/s (connection timed out)"


def test_rank_that_hangs_in_a_stage_is_named_with_the_stage() -> None:
    hung = rank(0, ProbeLine("copy", "begun"), device="0", error="it did not end within 30 s")
    (found,) = judge_speed(readings(host("a", hung)))
    assert (found.level, found.host) == (Level.BAD, "a")
    assert found.text == "the copies to the GPU failed on GPU 0: it did not end within 30 s"


def test_same_failure_of_several_ranks_is_one_finding() -> None:
    failed = ProbeLine("local", "failed", text="no interface eth9")
    (found,) = judge_speed(readings(host("a", rank(0, failed), rank(1, failed))))
    assert found.text == "the all-reduce inside this host failed on rank 0, rank 1: no interface eth9"


def test_rank_that_failed_outside_the_stages_is_named_with_its_reason() -> None:
    ranks = [rank(number, error="exit code 1") for number in (0, 1)]
    (found,) = judge_speed(readings(host("a", *ranks)))
    assert (found.level, found.host, found.subject, found.hint) == (Level.BAD, "a", "rank", "")
    assert found.text == "the measurement failed on rank 0, rank 1: exit code 1"


def test_failure_without_a_text_has_the_reason_of_its_rank() -> None:
    failed = rank(0, ProbeLine("gemm", "failed"), device="3", error="exit code 1")
    (found,) = judge_speed(readings(host("a", failed)))
    assert (found.subject, found.text) == ("gemm", "the matrix products failed on GPU 3: exit code 1")


def test_failed_all_reduce_of_all_ranks_is_bad() -> None:
    (found,) = judge_speed(readings(host("a"), everyone_error="time-out"))
    assert (found.level, found.text) == (Level.BAD, "the all-reduce of all ranks failed: time-out")


def test_better_of_two_measurements_counts_but_a_failure_stays() -> None:
    first = rank(0, pair(1, 1.0, 80.0), gflops=100.0)
    second = rank(0, pair(1, 2.0, 90.0), gflops=50.0)
    both = better_of(first, second)
    assert both.value("gemm", "gflops") == 100.0
    assert (both.value("pair", "gb_s"), both.value("pair", "latency_us")) == (2.0, 80.0)
    failed = rank(0, ProbeLine("pair", "failed", 1, text="lost"), error="exit code 1")
    again = better_of(first, failed)
    assert [line.text for line in again.failures()] == ["lost"] and again.error == "exit code 1"


def with_wait(found: Readings, node: int, share: float) -> Readings:
    """The same readings, but the ranks of a host waited for a core in this part of each measurement."""
    hosts = list(found.hosts)
    ranks = tuple(
        replace(each, lines=tuple(replace(line, values={**line.values, WAITED: share}) for line in each.lines))
        for each in hosts[node].ranks
    )
    hosts[node] = replace(hosts[node], ranks=ranks)
    return replace(found, hosts=tuple(hosts))


def test_slow_measurement_on_a_busy_host_is_a_warning_that_says_so() -> None:
    slow = measured({(0, 1): 1.0, (0, 2): 0.3, (1, 2): 0.3}, 3)
    (found,) = judge_speed(with_wait(slow, 2, 0.45))
    assert (found.level, found.host) == (Level.WARNING, "c")
    assert found.text.endswith("30 % of the median of 3 (1); other processes had the cores 45 % of the time on c")
    (found,) = judge_speed(with_wait(slow, 2, 0.1))
    assert found.level is Level.BAD  # its network is slow: its ranks slept
    (found,) = judge_speed(with_wait(measured({(0, 1): 1.0, (0, 2): 0.05, (1, 2): 0.05}, 3), 2, 0.9))
    assert found.level is Level.BAD  # the waits do not explain that
    (found,) = judge_speed(with_wait(slow, 0, 0.9))
    assert found.level is Level.BAD  # another host was busy


def test_slow_cores_of_a_busy_host_are_a_warning_but_a_slow_gpu_is_bad() -> None:
    for device, level in (("", Level.WARNING), ("0", Level.BAD)):
        hosts = [host(name, rank(0, gflops=100.0, device=device)) for name in "ab"]
        slow = readings(*hosts, host("c", rank(0, gflops=20.0, device=device)))
        (found,) = judge_speed(with_wait(slow, 2, 0.6))
        assert (found.level, found.host, found.subject) == (level, "c", "gemm")


def test_pair_with_a_busy_host_is_a_warning() -> None:
    speeds = {(a, b): 1.0 for a in range(4) for b in range(a + 1, 4)}
    (found,) = judge_speed(with_wait(measured({**speeds, (1, 3): 0.3}, 4), 3, 0.5))
    assert (found.level, found.host, found.other) == (Level.WARNING, "b", "d")
    assert found.text.endswith("other processes had the cores 0 % of the time on b and 50 % of the time on d")


def test_of_two_measurements_the_one_without_waits_tells_whether_a_host_was_busy() -> None:
    first, second = (
        ProbeLine("gemm", "done", values={"gflops": speed, WAITED: share}) for speed, share in ((1, 0.6), (2, 0))
    )
    better = better_of(replace(rank(0), lines=(first,)), replace(rank(0), lines=(second,)))
    assert better.lines[0].values == {"gflops": 2, WAITED: 0}


def test_wait_of_the_better_measurement_counts_also_where_it_is_longer() -> None:
    first, second = (pair(1, speed, 80.0) for speed in (0.1, 0.2))
    first, second = (
        replace(line, values={**line.values, WAITED: share}) for line, share in ((first, 0.1), (second, 0.5))
    )
    better = better_of(replace(rank(0), lines=(first,)), replace(rank(0), lines=(second,)))
    assert (better.lines[0].values["gb_s"], better.lines[0].values[WAITED]) == (0.2, 0.5)


def test_only_the_waits_of_the_slow_pair_excuse_it() -> None:
    speeds = {(a, b): 1.0 for a in range(4) for b in range(a + 1, 4)}
    slow = measured({**speeds, (1, 3): 0.3}, 4)

    def waiting(peer: int) -> Readings:
        """Host d waited half of the time while it measured with this one."""
        lines = tuple(
            replace(line, values={**line.values, WAITED: 0.5 if line.peer == peer else 0.0})
            for line in slow.hosts[3].ranks[0].lines
        )
        d = replace(slow.hosts[3], ranks=(replace(slow.hosts[3].ranks[0], lines=lines),))
        return replace(slow, hosts=(*slow.hosts[:3], d))

    assert [each.level for each in judge_speed(waiting(1))] == [Level.WARNING]
    assert [each.level for each in judge_speed(waiting(0))] == [Level.BAD]


def test_slow_all_reduce_inside_a_busy_host_is_a_warning_but_that_of_gpus_is_bad() -> None:
    for device, level in (("", Level.WARNING), ("0", Level.BAD)):
        hosts = [
            host(name, rank(0, ProbeLine("local", "done", values={"gb_s": gb_s}), device=device))
            for name, gb_s in (("a", 10.0), ("b", 10.0), ("c", 1.0))
        ]
        (found,) = judge_speed(with_wait(readings(*hosts), 2, 0.6))
        assert (found.level, found.host, found.subject) == (level, "c", "all-reduce inside")


def of_three(stage: str, name: str, value: float, *, device: str = "", usual: float = 100.0) -> list[Level]:
    """The levels of the findings about three hosts, the last of which has measured `value`."""
    lines = [ProbeLine(stage, "done", values={name: each}) for each in (usual, usual, value)]
    hosts = [host(name, rank(0).__class__(0, (line,), device)) for name, line in zip("abc", lines, strict=True)]
    return [each.level for each in judge_speed(readings(*hosts)) if each.host == "c"]


@pytest.mark.parametrize(
    ("stage", "name", "device", "warning", "bad"),
    [
        ("gemm", "gflops", "0", 90.0, 80.0),
        ("gemm", "gflops", "", 50.0, 30.0),
        ("copy", "gb_s", "0", 80.0, 50.0),
        ("local", "gb_s", "0", 70.0, 50.0),
        ("local", "gb_s", "", 40.0, 20.0),
    ],
)
def test_slow_measurement_is_a_warning_below_one_limit_and_bad_below_another(
    stage: str, name: str, device: str, warning: float, bad: float
) -> None:
    found = [of_three(stage, name, value, device=device) for value in (warning, warning - 0.1, bad, bad - 0.1)]
    assert found == [[], [Level.WARNING], [Level.WARNING], [Level.BAD]]


@pytest.mark.parametrize(
    ("gb_s", "mbit", "expected"),
    [
        (0.125, 10_000, []),
        (0.1249, 10_000, [Level.WARNING]),
        (0.025, 10_000, [Level.WARNING]),
        (0.0249, 10_000, [Level.BAD]),
        (0.125, 200_000, []),  # one connection does not use more than 10 Gbit/s
        (0.0125, 1_000, []),
        (0.0124, 1_000, [Level.BAD]),
        (0.0125, 0, []),
        (0.0124, 0, [Level.BAD]),
    ],
)
def test_speed_of_a_pair_has_limits_by_its_interfaces(gb_s: float, mbit: int, expected: list[Level]) -> None:
    link = replace(ETH0, speed_mbit=mbit)
    assert [each.level for each in judge_speed(measured({(0, 1): gb_s}, 2, interfaces=(link,)))] == expected


def test_slower_interface_of_a_pair_counts() -> None:
    slow, fast = (
        host(name, rank(node, pair(1 - node, 0.05)), interfaces=(replace(ETH0, speed_mbit=mbit),))
        for node, (name, mbit) in enumerate([("a", 1_000), ("b", 10_000)])
    )
    assert judge_speed(readings(slow, fast)) == []
    unknown = host("a", rank(0, pair(1, 0.05)), interfaces=(replace(ETH0, speed_mbit=0),))
    (found,) = judge_speed(readings(unknown, fast))
    assert found.text.endswith("all-reduce: 0.05 GB/s (0.4 Gbit/s); the interfaces promise 10 Gbit/s")


@pytest.mark.parametrize(
    ("usual_us", "slow_us", "texts"),
    [
        (50.0, 2_000.0, []),
        (50.0, 2_001.0, ["all-reduce of 8 bytes takes 2 ms, the median is 0.05 ms"]),
        (1_000.0, 5_000.0, []),
        (1_000.0, 5_001.0, ["all-reduce of 8 bytes takes 5 ms, the median is 1 ms"]),
    ],
)
def test_pair_with_a_long_latency_is_a_warning(usual_us: float, slow_us: float, texts: list[str]) -> None:
    hosts = (
        host("a", rank(0, pair(1, 1.0, usual_us), pair(2, 1.0, usual_us))),
        host("b", rank(1, pair(0, 1.0, usual_us), pair(2, 1.0, slow_us))),
        host("c", rank(2, pair(0, 1.0, usual_us), pair(1, 1.0, slow_us))),
    )
    found = judge_speed(readings(*hosts))
    assert [each.text.partition("10 Gbit/s): ")[2] for each in found] == texts
    assert all((each.level, each.host, each.other, each.of_limit) == (Level.WARNING, "b", "c", 0.0) for each in found)


def test_long_latency_of_two_pairs_is_not_compared() -> None:
    hosts = (host("a", rank(0, pair(1, 1.0), pair(2, 1.0, 9_000.0))), host("b", rank(1)), host("c", rank(2)))
    assert judge_speed(readings(*hosts)) == []


@pytest.mark.parametrize(("gb_s", "level"), [(1.0, []), (0.99, [Level.BAD])])
def test_pair_below_half_of_the_median_is_bad(gb_s: float, level: list[Level]) -> None:
    speeds = {(a, b): 2.0 for a in range(4) for b in range(a + 1, 4)}
    assert [each.level for each in judge_speed(measured({**speeds, (1, 3): gb_s}, 4))] == level


@pytest.mark.parametrize(
    ("gb_s", "level"), [(1.4, []), (1.39, [Level.WARNING]), (1.0, [Level.WARNING]), (0.99, [Level.BAD])]
)
def test_host_is_slow_if_its_pairs_are(gb_s: float, level: list[Level]) -> None:
    found = judge_speed(measured({(0, 1): 2.0, (0, 2): gb_s, (1, 2): gb_s}, 3))
    assert [(each.level, each.host) for each in found] == [(each, "c") for each in level]


def test_pair_of_which_only_one_number_is_known_is_not_judged() -> None:
    half = ProbeLine("pair", "done", 1, {"gb_s": 0.001})
    assert judge_speed(readings(host("a", rank(0, half)), host("b", rank(1)))) == []


def test_pair_that_failed_between_hosts_that_others_reach_is_named_as_a_pair() -> None:
    failed = ProbeLine("pair", "failed", 1, text="time-out")
    hosts = (
        host("a", rank(0, failed, pair(2, 1.0))),
        host("b", rank(1, pair(2, 1.0))),
        host("c", rank(2, pair(0, 1.0), pair(1, 1.0))),
    )
    (found,) = judge_speed(readings(*hosts))
    assert (found.level, found.subject, found.host, found.other) == (Level.BAD, "network", "a", "b")
    assert found.text == "between a (eth0, 10 Gbit/s) and b (eth0, 10 Gbit/s): no all-reduce (time-out)"


def test_two_hosts_that_do_not_reach_each_other_are_a_pair() -> None:
    hosts = (host("a", rank(0, ProbeLine("pair", "failed", 1, text="time-out"))), host("b", rank(1)))
    (found,) = judge_speed(readings(*hosts))
    assert (found.host, found.other) == ("a", "b")


def test_reduced_clocks_explain_a_slow_gpu() -> None:
    def gpu(name: str, gflops: float, text: str = "") -> HostReading:
        return host(
            name, replace(rank(0, device="0"), lines=(ProbeLine("gemm", "done", -1, {"gflops": gflops}, text),))
        )

    slow, throttled = judge_speed(readings(gpu("a", 100.0), gpu("b", 100.0), gpu("c", 50.0, "power cap")))
    assert slow.text == "GPU 0: 50 GFLOP/s, 50 % of the median of 3 (100); its clocks are reduced: power cap"
    assert (throttled.level, throttled.host, throttled.subject) == (Level.BAD, "c", "throttling")


def test_number_of_one_measurement_only_is_no_reason_to_take_its_wait() -> None:
    first = replace(rank(0), lines=(ProbeLine("gemm", "done", values={"gflops": 2.0, WAITED: 0.1}),))
    second = replace(rank(0), lines=(ProbeLine("gemm", "done", values={"gflops": 1.0, WAITED: 0.5}),))
    assert better_of(first, second).lines[0].values == {"gflops": 2.0, WAITED: 0.1}


def test_pair_is_known_from_either_of_its_hosts_and_impossible_peers_are_left_out() -> None:
    (found,) = pairs_of((host("a", rank(0)), host("b", rank(1, pair(0, 3.0, 20.0)))))
    assert (found.first, found.second, found.gb_s, found.latency_us, found.error) == ("a", "b", 3.0, 20.0, "")
    failed = ProbeLine("pair", "failed", 1)
    assert pairs_of((host("a", rank(0, pair(0, 1.0), pair(2, 1.0), pair(-1, 1.0))), host("b"))) == ()
    (found,) = pairs_of((host("a", rank(0, failed)), host("b", rank(1, pair(0, 3.0)))))
    assert (found.gb_s, found.error) == (3.0, "")
    (found,) = pairs_of((host("a", rank(0, failed)), host("b")))
    assert (found.gb_s, found.error) == (None, "it did not end")


def test_host_is_called_by_its_name_and_by_another_address() -> None:
    there = host("a")
    assert there.name == "a" and host("b", error="silent").name == "b"
    assert replace(there, host="127.0.0.1").name == replace(there, host="::1").name == "a"
    assert replace(there, host="10.0.0.7").name == "a (10.0.0.7)"
