"""Which hosts are left out, and whether the rest is usable; what runs do with it; the text of a report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.cluster_check.before_run import CheckedSlots
from ddptrain.driver.cluster_check.check import DEPTHS, HostCheck, Report, hosts_to_leave_out, plan_again
from ddptrain.driver.cluster_check.findings import Finding, Level
from ddptrain.driver.cluster_check.readings import HostReading, Readings, pairs_of
from ddptrain.driver.cluster_check.report import as_dict, lines, result
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.errors import ClusterError
from ddptrain.protocol.cluster_check import ProbeLine
from tests.unit.driver.cluster_check.hosts import host, pair, rank


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
