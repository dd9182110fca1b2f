"""Which hosts are left out, and whether the rest is usable; what runs do with it; the text of a report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.cluster_check import check
from ddptrain.driver.cluster_check.before_run import CheckedSlots
from ddptrain.driver.cluster_check.check import HostCheck, Report, hosts_to_leave_out
from ddptrain.driver.cluster_check.facts import Answer
from ddptrain.driver.cluster_check.findings import Finding, Level
from ddptrain.driver.cluster_check.probe_plan import DEPTHS, plan_again
from ddptrain.driver.cluster_check.readings import HostReading, RankReading, Readings, pairs_of
from ddptrain.driver.cluster_check.report import as_dict, lines, result
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.errors import ClusterError
from ddptrain.protocol.cluster_check import ProbeLine, ProbePlan
from tests.unit.driver.cluster_check.hosts import CLOCK, facts, host, pair, rank


def bad(name: str, other: str = "", subject: str = "network") -> Finding:
    return Finding(Level.BAD, name, subject, "slow", other=other)


def report(*findings: Finding, **more: Any) -> Report:
    hosts = [host(name, rank(0)) for name in "abc"]
    return Report("quick", Readings(tuple(hosts)), findings, 1.25, **more)


def test_host_of_most_bad_pairs_is_left_out_and_of_equal_ones_the_second() -> None:
    assert hosts_to_leave_out([bad("a", "c"), bad("b", "c")]) == ("c",)
    assert hosts_to_leave_out([bad("a", "b")]) == ("b",)
    assert hosts_to_leave_out([bad("a"), bad("a", "b")]) == ("a",)
    assert hosts_to_leave_out([bad("a", "b"), bad("c", "d")]) == ("b", "d")
    assert hosts_to_leave_out([Finding(Level.WARNING, "a", "disk", "full"), bad("")]) == ()


def test_only_bad_pairs_and_pairs_of_hosts_with_a_bad_network_are_measured_again() -> None:
    plan = DEPTHS["quick"].plan(4, gpu=False)
    assert plan.rounds == (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    warning = Finding(Level.WARNING, "a", "disk", "nearly full")
    again = plan_again(plan, [bad("b", "d"), warning], "abcd")
    assert (again.rounds, again.only) == ((((1, 3),),), "pairs")
    again = plan_again(plan, [bad("b", "d"), bad("a")], "abcd")
    assert again.rounds == (((0, 3),), ((0, 2), (1, 3)), ((0, 1),))
    assert plan_again(plan, [bad("b", "d"), bad("a", subject="gemm")], "abcd") == plan
    assert plan_again(plan, [bad("", subject="all ranks")], "abcd") == plan


def test_cluster_is_usable_if_nothing_bad_is_left() -> None:
    warning = Finding(Level.WARNING, "a", "disk", "nearly full")
    assert report(warning).usable
    assert not report(bad("a")).usable
    assert report(bad("a"), left_out=("a",)).usable
    assert report(bad("a"), bad("", subject="all ranks"), left_out=("a",)).usable
    assert not report(bad("a"), bad("", subject="versions"), left_out=("a",)).usable  # it is not known which is wrong
    assert not report(bad("a"), left_out=("a",), everyone_else_error="time-out").usable
    assert not report(bad("a"), left_out=("a", "b", "c")).usable
    assert not Report("quick", Readings((HostReading("a", (), busy=("run-1",)),)), (), 0.1).usable


def test_report_has_a_row_for_each_host_and_names_what_is_wrong() -> None:
    hosts = (host("a", rank(0, pair(1, 2.0, 40.0))), host("b", rank(1, pair(0, 2.0, 40.0))))
    busy = HostReading("c", (), busy=("run-1",))
    everyone = {"gb_s": 1.5, "latency_us": 60.0}
    found = Report(
        "deep", Readings((*hosts, busy), pairs_of(hosts), everyone), (bad("b"),), 1.25, ("b",), {"gb_s": 3.0}, ""
    )
    text = lines(found, all_pairs=True)
    table = text[0].splitlines()
    assert " ".join(table[0].split()) == "HOST RESULT DEVICES GFLOP/s TO GPU IN HOST TO HOSTS LATENCY DISK CLOCK"
    assert table[1].split() == ["a", "ok", "16", "cores", "100", "-", "-", "2", "0.04", "1000", "+0.001"]
    assert table[2].split()[1:3] == ["left", "out"]
    assert table[3].split()[:2] == ["c", "busy"]
    assert "bad: b: network: slow" in text
    assert "all-reduce of all ranks: 1.5 GB/s, 8 bytes in 0.06 ms" in text
    assert "c was not checked: all of its slots are in use by run-1" in text
    assert text[-1] == "1 of 2 hosts ok, 1 left out, deep check in 1.2 s"
    data = json.loads(json.dumps(as_dict(found)))
    assert data["usable"] is True and data["left_out"] == ["b"]
    assert [each["result"] for each in data["hosts"]] == ["ok", "left out", "busy"]
    assert data["pairs"] == [{"first": "a", "second": "b", "gb_s": 2.0, "latency_us": 40.0, "error": ""}]


def test_last_line_counts_the_hosts_by_their_result() -> None:
    hosts = tuple(host(name, rank(number)) for number, name in enumerate("abcd"))
    warnings = [dataclasses.replace(bad(name), level=Level.WARNING) for name in "bc"]
    assert lines(Report("quick", Readings(hosts), (*warnings, bad("d")), 2.0), all_pairs=False)[-1] == (
        "1 of 4 hosts ok, 2 with warnings, 1 bad, quick check in 2.0 s"
    )
    assert (
        lines(Report("quick", Readings(hosts), (), 2.0), all_pairs=False)[-1] == "4 of 4 hosts ok, quick check in 2.0 s"
    )


def test_data_of_a_report_has_each_measurement_of_each_rank() -> None:
    done = [
        ProbeLine("copy", "done", values={"gb_s": 20.0}),
        ProbeLine("local", "done", values={"gb_s": 5.0, "latency_us": 30.0}),
    ]
    hosts = (host("a", rank(3, *done, gflops=7.0, device="GPU", error="e")), HostReading("b", ("w",), error="silent"))
    first, second = as_dict(Report("deep", Readings(hosts), (), 1.0))["hosts"]
    assert first["ranks"] == [
        {
            "rank": 3,
            "device": "GPU",
            "error": "e",
            "gflops": 7.0,
            "to_gpu_gb_s": 20.0,
            "in_host_gb_s": 5.0,
            "in_host_latency_us": 30.0,
        }
    ]
    assert (first["host"], first["workers"], first["busy"], first["error"]) == ("a", ["tcp://a:1"], [], "")
    assert first["clock"] == {"offset_s": 0.001, "uncertainty_s": 0.001} and first["facts"]["hostname"] == "a"
    assert (second["facts"], second["clock"], second["error"], second["ranks"]) == (None, None, "silent", [])


def test_host_is_not_bad_for_its_pair_with_a_host_that_is_left_out() -> None:
    found = report(bad("a", "b"), left_out=("b",))
    assert [result(found, each) for each in found.readings.hosts] == ["ok", "left out", "ok"]


def test_escape_sequences_of_a_host_do_not_reach_the_terminal() -> None:
    name = "evil\x1b[2J"
    found = Report("quick", Readings((host(name, rank(0)),)), (bad(name),), 1.0)
    assert "\x1b" not in "".join(lines(found, all_pairs=True))


@dataclasses.dataclass
class Scene:
    """Stands for the worker group, the recorder and the slot table of a run on hosts with a slot each."""

    hosts: Sequence[str]
    wrong: Mapping[str, Level]
    avoided: set[str] = dataclasses.field(default_factory=set)
    told: list[str] = dataclasses.field(default_factory=list)
    gathered: list[bool] = dataclasses.field(default_factory=list)
    checks: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

    @property
    def client(self) -> Scene:
        return self

    def run_on_scheduler(self, _: object) -> dict[str, Any]:
        return {"workers": [{"host": name, "address": f"tcp://{name}:1"} for name in self.hosts]}

    def avoid(self, worker: str) -> None:
        self.avoided.add(worker)

    def status(self, text: str) -> None:
        self.told.append(text)

    notice = warn = status

    def event(self, kind: str, **fields: Any) -> None:
        self.told.append(kind)

    def reserve(self, gather: bool) -> list[RankPlace]:  # as the run's own function
        self.gathered.append(gather)
        slots = [Slot(f"tcp://{name}:1", name, 0, False, True) for name in self.hosts]
        free = [slot for slot in slots if slot.worker not in self.avoided]
        if not free:
            raise ClusterError("no slots")
        return [RankPlace(i, 0, 1, i, slot, slot.host, Path("/"), True) for i, slot in enumerate(free)]

    def check(self, places: Sequence[RankPlace], *_: object) -> Report:
        names = tuple(place.slot.host for place in places)
        self.checks.append(names)
        findings = [Finding(self.wrong[name], name, "disk", "full") for name in names if name in self.wrong]
        return Report("quick", Readings(tuple(host(name, rank(0)) for name in names)), tuple(findings), 1.0)


def checked(scene: Scene, monkeypatch: pytest.MonkeyPatch, **cluster: Any) -> CheckedSlots:
    monkeypatch.setattr(HostCheck, "run", lambda _, places: scene.check(places))
    monkeypatch.setattr(HostCheck, "_measured", lambda *_, **__: [])
    config = RunConfig.model_validate({"workload": "petnames", "cluster": cluster})
    group: Any = scene
    return CheckedSlots(config, group, group, lambda: None)


def test_run_checks_its_hosts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("ab", {})
    slots = checked(scene, monkeypatch, check="quick")
    for _ in range(2):
        assert [place.host for place in slots.reserve(scene.reserve)] == ["a", "b"]
    assert scene.checks == [("a", "b")]
    scene.hosts = "abc"  # a new host has joined before the next attempt
    slots.reserve(scene.reserve)
    assert scene.checks == [("a", "b"), ("a", "b", "c")]


def test_run_without_check_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("ab", {"a": Level.BAD})
    assert len(checked(scene, monkeypatch).reserve(scene.reserve)) == 2
    assert scene.checks == []
    assert scene.told == []


def test_run_ends_at_a_bad_host_and_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("ab", {"b": Level.BAD})
    with pytest.raises(ClusterError, match=r"\(quick\) found: b: disk: full\. cluster\.exclude_bad: true trains"):
        checked(scene, monkeypatch, check="quick").reserve(scene.reserve)


def test_run_goes_on_without_bad_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("abc", {"a": Level.WARNING, "b": Level.BAD})
    slots = checked(scene, monkeypatch, check="quick", exclude_bad=True)
    assert [place.host for place in slots.reserve(scene.reserve)] == ["a", "c"]
    assert scene.avoided == {"tcp://b:1"}
    assert "this run does not use b" in scene.told
    assert scene.gathered == [True, False]  # it does not wait for a host in place of the bad one
    scene.avoided.clear()  # its worker was started again
    assert [place.host for place in slots.reserve(scene.reserve)] == ["a", "c"]


def test_run_ends_if_no_host_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("a", {"a": Level.BAD})
    with pytest.raises(ClusterError, match="a: disk: full"):
        checked(scene, monkeypatch, check="quick", exclude_bad=True).reserve(scene.reserve)


def test_plan_of_a_quick_check_of_many_hosts_has_few_rounds() -> None:
    plan = DEPTHS["quick"].plan(128, gpu=False)
    assert len(plan.rounds) == 7 and not plan.nccl_pairs
    assert DEPTHS["deep"].plan(4, gpu=True).nccl_pairs


def place(rank_number: int, name: str, node_rank: int, *, gpu: bool = True) -> RankPlace:
    slot = Slot(f"tcp://{name}:{rank_number}", name, 0, gpu, True)
    return RankPlace(rank_number, 0, 1, node_rank, slot, name, Path("/"), True)


class Measuring:
    """Stands for hosts and their ranks; each measurement takes the next readings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *measured: list[RankReading]) -> None:
        self.plans: list[tuple[list[int], ProbePlan]] = []
        self.asked: list[str] = []
        self._measured = iter(measured)
        monkeypatch.setattr(check, "ask_hosts", self._ask)
        monkeypatch.setattr(check, "run_probes", self._run)

    def host_check(self, depth: str = "quick", *, on_gpus: bool = True) -> HostCheck:
        group: Any = SimpleNamespace(client="the client")
        return HostCheck(group, DEPTHS[depth], {"NCCL_DEBUG": "INFO"}, self.called, on_gpus)

    def called(self) -> None:
        raise AssertionError("only ranks that measure call it")

    def _ask(self, client: object, workers: Sequence[str], timeout_s: float) -> Mapping[str, Answer]:
        assert (client, timeout_s) == ("the client", 10.0)
        self.asked += workers
        return {worker: Answer(facts(hostname=worker[6:7]), CLOCK) for worker in workers}

    def _run(self, group: object, places: Sequence[RankPlace], plan: ProbePlan, *more: object) -> list[RankReading]:
        assert more == ({"NCCL_DEBUG": "INFO"}, DEPTHS["quick"].deadline_s, self.called)
        self.plans.append(([place.rank for place in places], plan))
        return next(self._measured)


def everyone(gb_s: float) -> ProbeLine:
    return ProbeLine("all", "done", values={"gb_s": gb_s})


def test_hosts_are_asked_once_and_read_in_the_order_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [rank(0, everyone(2.0)), rank(1), rank(2)]
    measuring = Measuring(monkeypatch, measured)
    places = [place(0, "b", 1), place(1, "a", 0), place(2, "b", 1)]
    found = measuring.host_check(on_gpus=False).run(places, {"c": ("run-1",)})
    assert measuring.asked == ["tcp://b:0", "tcp://a:1"]
    assert measuring.plans == [([0, 1, 2], DEPTHS["quick"].plan(2, gpu=False))]
    assert found.depth == "quick" and found.findings == () and found.seconds >= 0.0
    assert [(each.host, each.workers, each.ranks, each.busy) for each in found.readings.hosts] == [
        ("a", ("tcp://a:1",), (measured[1],), ()),
        ("b", ("tcp://b:0", "tcp://b:2"), (measured[0], measured[2]), ()),
        ("c", (), (), ("run-1",)),
    ]
    assert (found.readings.everyone, found.readings.everyone_error) == ({"gb_s": 2.0}, "")
    assert [each.facts.network_env for each in found.readings.hosts[:2] if each.facts] == [{"NCCL_DEBUG": "INFO"}] * 2


def test_without_a_place_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Measuring(monkeypatch).host_check().run([], {"c": ("run-1",)})
    assert [each.host for each in found.readings.hosts] == ["c"] and not found.usable


def test_a_bad_value_is_measured_again_and_the_better_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "abcd"
    places = [place(number, name, number) for number, name in enumerate(names)]
    first = [rank(number, device=str(number), gflops=10.0 if number == 3 else 100.0) for number in range(4)]
    second = [rank(number, device=str(number), gflops=90.0) for number in range(4)]
    measuring = Measuring(monkeypatch, first, second)
    found = measuring.host_check().run(places)
    plan = DEPTHS["quick"].plan(4, gpu=True)
    assert measuring.plans == [([0, 1, 2, 3], plan)] * 2
    assert [each.ranks[0].value("gemm", "gflops") for each in found.readings.hosts] == [100.0, 100.0, 100.0, 90.0]
    assert found.bad == ()
    measuring = Measuring(monkeypatch, first, first)
    found = measuring.host_check().run(places)
    assert len(measuring.plans) == 2 and found.bad == ("d",) and found.findings[0].level is Level.BAD
    failed = [rank(0, error="exit code 1"), *first[1:]]
    assert len(Measuring(monkeypatch, failed).host_check().run(places).findings) == 2


def test_all_ranks_are_measured_again_without_the_hosts_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [place(number, name, number) for number, name in enumerate("abc")]
    measuring = Measuring(monkeypatch, [rank(0), rank(1, everyone(3.0))])
    before = report(bad("a"))
    found = measuring.host_check().without_bad(before, places)
    assert measuring.plans == [([0, 1], DEPTHS["quick"].plan(2, gpu=True, only="all"))]
    assert (found.left_out, found.everyone_else, found.everyone_else_error) == (("a",), {"gb_s": 3.0}, "")
    assert found.seconds >= before.seconds
    failed = rank(1, ProbeLine("all", "failed", text="time-out"))
    found = Measuring(monkeypatch, [rank(0), failed]).host_check().without_bad(before, places)
    assert (found.everyone_else, found.everyone_else_error) == (None, "time-out")
    for findings in ([], [bad("a"), bad("b")]):  # nothing is left out, or one host is left
        found = Measuring(monkeypatch).host_check().without_bad(report(*findings), places)
        assert found == dataclasses.replace(report(*findings), left_out=tuple(each.host for each in findings))


def test_places_that_are_left_are_numbered_from_0() -> None:
    left = check._numbered([place(1, "b", 1), place(4, "d", 3), place(6, "b", 1)])
    assert [(each.rank, each.node_rank, each.host) for each in left] == [(0, 0, "b"), (1, 1, "d"), (2, 0, "b")]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], (None, "")),
        ([rank(0), rank(1, everyone(2.0), everyone(3.0))], ({"gb_s": 2.0}, "")),
        ([rank(0, everyone(2.0)), rank(1, ProbeLine("all", "failed", text="lost"))], (None, "lost")),
        ([rank(0, everyone(2.0)), rank(1, ProbeLine("all", "failed"), error="exit code 1")], (None, "exit code 1")),
        (
            [rank(0, ProbeLine("pair", "failed", 1), ProbeLine("all", "skipped", text="a pair failed"))],
            (None, "a pair failed"),
        ),
        ([rank(0, ProbeLine("all", "begun"))], (None, "")),
    ],
)
def test_all_reduce_of_all_ranks_is_that_of_the_first_rank_that_has_it(
    ranks: list[RankReading], expected: tuple[dict[str, float] | None, str]
) -> None:
    assert check._everyone(ranks) == expected


@pytest.mark.parametrize(
    ("depth", "gpu", "plan", "limits"),
    [
        ("quick", False, ProbePlan((((0, 1),),), 0.15, 0.1, 0.08, 4.0, 1 << 20, False, False, "all"), (10.0, 30.0)),
        ("quick", True, ProbePlan((((0, 1),),), 0.15, 0.1, 0.08, 4.0, 64 << 20, True, False, "all"), (10.0, 30.0)),
        ("deep", False, ProbePlan((((0, 1),),), 5.0, 1.0, 0.5, 10.0, 64 << 20, False, False, "all"), (15.0, 90.0)),
        ("deep", True, ProbePlan((((0, 1),),), 5.0, 1.0, 0.5, 10.0, 1 << 30, True, True, "all"), (15.0, 90.0)),
    ],
)
def test_a_deep_check_measures_longer_and_more(
    depth: str, gpu: bool, plan: ProbePlan, limits: tuple[float, float]
) -> None:
    chosen = DEPTHS[depth]
    assert chosen.name == depth and chosen.plan(2, gpu=gpu, only="all") == plan
    assert (chosen.facts_s, chosen.deadline_s) == limits
    assert len(chosen.plan(100, gpu=gpu).rounds) == {"quick": 7, "deep": 15}[depth]


def test_findings_begin_with_the_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(monkeypatch, [rank(0, error="exit code 1")])
    monkeypatch.setattr(check, "judge_facts", lambda *_: [Finding(Level.WARNING, "a", "disk", "nearly full")])
    found = measuring.host_check().run([place(0, "a", 0)])
    assert [each.level for each in found.findings] == [Level.BAD, Level.WARNING]


def test_gpus_are_measured_where_every_place_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [place(0, "a", 0), place(1, "b", 1, gpu=False)]
    measuring = Measuring(monkeypatch, [rank(0), rank(1)])
    measuring.host_check().run(places)
    assert [plan.gpu for _, plan in measuring.plans] == [False]


def test_time_of_the_second_measurement_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(monkeypatch, [rank(0, everyone(2.0)), rank(1)])
    times = iter([100.0, 103.0])
    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: next(times)))
    places = [place(number, name, number) for number, name in enumerate("abc")]
    found = measuring.host_check().without_bad(report(bad("a")), places)
    assert found.seconds == 1.25 + 3.0 and found.left_out == ("a",) and found.everyone_else == {"gb_s": 2.0}
    assert [ranks for ranks, _ in measuring.plans] == [[0, 1]] and measuring.plans[0][1].only == "all"


def test_all_reduce_of_all_ranks_is_reported_with_and_without_bad_hosts() -> None:
    values = {"gb_s": 1.5, "latency_us": 60.0}
    found = as_dict(dataclasses.replace(report(), seconds=1.256, everyone_else_error="time-out"))
    assert (found["all_ranks"], found["all_ranks_without_bad"]) == (None, {"error": "time-out"})
    assert found["seconds"] == 1.26
    readings = Readings((host("a", rank(0)),), everyone=values)
    found = as_dict(Report("quick", readings, (), 1.0, everyone_else=values))
    assert found["all_ranks"] == found["all_ranks_without_bad"] == {**values, "error": ""}


def test_text_names_what_was_not_measured() -> None:
    failed = report(bad("a"), left_out=("a",), everyone_else_error="time-out")
    assert lines(failed, all_pairs=False)[-3:] == [
        "all-reduce of all ranks without a failed: time-out",
        "left out: a",
        "2 of 3 hosts ok, 1 left out, quick check in 1.2 s",
    ]
    busy = Report("quick", Readings((HostReading("c", (), busy=("r1", "r2")),)), (), 0.1)
    assert lines(busy, all_pairs=False)[-2:] == [
        "c was not checked: all of its slots are in use by r1, r2",
        "no host was checked, quick check in 0.1 s",
    ]
    assert not any("failed" in line for line in lines(report(), all_pairs=False))


def test_pairs_are_listed_with_gb_s_and_ms() -> None:
    hosts = (host("a", rank(0, pair(1, 2.0, 1_500.0))), host("b", rank(1, ProbeLine("pair", "failed", 2))), host("c"))
    found = Report("deep", Readings(hosts, pairs_of(hosts)), (), 1.0)
    table = lines(found, all_pairs=True)[2].splitlines()
    assert [row.split() for row in table] == [
        ["HOST", "OTHER", "HOST", "GB/s", "ms"],
        ["a", "b", "2", "1.5"],
        ["b", "c", "-", "-"],
    ]
    assert len(lines(found, all_pairs=False)) == 3


def test_row_of_a_host_has_the_middle_or_best_of_its_values() -> None:
    copies = [ProbeLine("copy", "done", values={"gb_s": speed}) for speed in (10.0, 12.0, 30.0)]
    local = [ProbeLine("local", "done", values={"gb_s": speed}) for speed in (4.0, 5.0)]
    ranks = (rank(0, copies[0], local[0], gflops=7.0), rank(1, copies[1], local[1], gflops=9.0), rank(2, copies[2]))
    found = Report("deep", Readings((host("a", *ranks), HostReading("b", ("w",), error="silent"))), (), 1.0)
    table = lines(found, all_pairs=False)[0].splitlines()
    assert table[1].split() == ["a", "ok", "16", "cores", "9", "12", "5", "-", "-", "1000", "+0.001"]
    assert table[2].split() == ["b", "ok", "-", "-", "-", "-", "-", "-", "-", "-"]


def test_too_few_slots_without_a_bad_host_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("", {})
    with pytest.raises(ClusterError, match=r"^no slots$"):
        checked(scene, monkeypatch, check="quick").reserve(scene.reserve)
