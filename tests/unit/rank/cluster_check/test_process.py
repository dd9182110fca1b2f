"""What a measuring rank measures with whom, in which order, and what it leaves out; with a store in memory."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddptrain.protocol.cluster_check import WAITED, ProbeLine, ProbePlan
from ddptrain.rank.cluster_check import process
from ddptrain.rank.cluster_check.process import Probe
from tests.fake_time import Clock


class Store:
    """A store of torch in memory; numbers are added to as text."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Bench:
    """A rank on a machine of its own: `groups` that it has measured in, and the lines that it has written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.store, self.clock = Store(), Clock(0.0)
        self.lines: list[ProbeLine] = []
        self.groups: list[tuple[Any, ...]] = []
        self.broken: set[str] = set()
        self.closed = 0
        bench = self

        class Group:
            def __init__(
                self, store: Any, name: str, rank: int, size: int, timeout_s: float, device: torch.device, *, nccl: bool
            ) -> None:
                assert (store, timeout_s, device) == (bench.store, 5.0, torch.device("cpu"))
                bench.groups.append((name, rank, size, nccl))
                if name in bench.broken:
                    raise RuntimeError("no route\nmore")

            def measure(self, seconds: float, most_bytes: int) -> dict[str, float]:
                assert (seconds, most_bytes) == (0.5, 4096)
                bench.clock.sleep(1.0)
                return {"gb_s": 1.0}

            def close(self) -> None:
                bench.closed += 1

        monkeypatch.setattr(process, "Group", Group)
        monkeypatch.setattr(process, "_write_line", self.lines.append)
        monkeypatch.setattr(process, "time", self.clock)
        monkeypatch.setattr(process, "_core_waits_s", dict)

        def gemm_gflops(device: torch.device, seconds: float) -> float:
            self.clock.sleep(1.0)
            return 10 * seconds

        monkeypatch.setattr(process, "gemm_gflops", gemm_gflops)

    def probe(self, rounds: Any = (((0, 1),),), *, rank: int = 0, node: int = 0, nodes: int = 2, **plan: Any) -> Probe:
        """A rank of nodes with two ranks each; rank is the number on its node."""
        environment = {"RANK": 2 * node + rank, "WORLD_SIZE": 2 * nodes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        for name, value in {**environment, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes}.items():
            self.monkeypatch.setenv(name, str(value))
        return Probe(ProbePlan(rounds, 0.2, 0.3, 0.5, 5.0, 4096, False, **plan))

    def told(self) -> list[tuple[Any, ...]]:
        """Stage, status and peer of each line."""
        return [(line.stage, line.status, line.peer) for line in self.lines]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


@pytest.mark.parametrize("only", ["", "pairs", "all"])
def test_rank_measures_itself_its_host_the_pairs_and_all(bench: Bench, only: str) -> None:
    opened: list[Any] = []

    def open_store(*arguments: Any, **options: Any) -> Store:
        opened.append(
            (*arguments, options["is_master"], options["wait_for_workers"], options["timeout"].total_seconds())
        )
        return bench.store

    bench.monkeypatch.setattr(process, "TCPStore", open_store)
    bench.monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    bench.monkeypatch.setenv("MASTER_PORT", "4000")
    for key in ("ready", "left"):
        bench.store.add(key, 3)  # the other ranks
    bench.probe(only=only).run()
    assert opened == [("10.0.0.1", 4000, 4, False, False, 10.0)]
    stages = {"": ["gemm", "local", "pair", "all"], "pairs": ["pair"], "all": ["all"]}[only]
    peers = {"pair": 1}
    expected = [(stage, status, peers.get(stage, -1)) for stage in stages for status in ("begun", "done")]
    assert bench.told() == [("start", "begun", -1), *expected, ("end", "done", -1)]
    groups = {"local": ("local/0", 0, 2, False), "pair": ("pair/0/0-1", 0, 2, False), "all": ("all", 0, 4, False)}
    assert bench.groups == [groups[stage] for stage in stages if stage in groups]
    assert bench.closed == len(bench.groups)
    assert bench.store.values["size/0"] == "2" and bench.store.values["left"] == "4"
    if not only:
        assert bench.lines[2].values == {"gflops": 2.0, WAITED: 0.0} and bench.lines[2].text == ""
        assert bench.lines[4].values == {"gb_s": 1.0, WAITED: 0.0}


@pytest.mark.parametrize(
    ("rank", "node", "nccl", "groups"),
    [
        (0, 0, False, [("pair/0/0-1", 0, 2, False), ("pair/1/0-2", 0, 2, False)]),
        (0, 1, False, [("pair/0/0-1", 1, 2, False)]),
        (0, 2, False, [("pair/1/0-2", 1, 2, False)]),
        (1, 0, False, []),  # one rank of each host
        (1, 0, True, [("pair/0/0-1", 1, 5, True), ("pair/1/0-2", 1, 3, True)]),
        (1, 1, True, [("pair/0/0-1", 3, 5, True)]),  # behind the ranks of the first host
        (0, 3, True, []),
    ],
)
def test_ranks_of_the_two_hosts_of_a_pair_measure_it(
    bench: Bench, rank: int, node: int, nccl: bool, groups: list[Any]
) -> None:
    bench.store.values |= {"size/0": "2", "size/1": "3", "size/2": "1"}
    probe = bench.probe((((0, 1),), ((0, 2),)), rank=rank, node=node, nodes=4, nccl_pairs=nccl)
    probe._pairs(bench.store)  # type: ignore[arg-type]
    assert bench.groups == groups
    peer_of_first = {0: [1, 2], 1: [0], 2: [0], 3: []}[node] if groups else []
    assert [line.peer for line in bench.lines] == [peer for peer in peer_of_first for _ in range(2)]
    assert (probe.succeeded, probe.failed) == (len(groups), 0)


def pairs_with(*others: int) -> Any:
    return tuple((((0, other)),) for other in others)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({1, 2}, ["failed", "failed", "skipped", "skipped"]),
        ({2, 3, 4}, ["done", "failed", "failed", "failed"]),  # the host is well: the others are tried
        ({1}, ["failed", "done", "done", "done"]),
    ],
)
def test_host_that_reaches_nobody_gives_up(bench: Bench, broken: set[int], expected: list[str]) -> None:
    bench.broken = {f"pair/{number - 1}/0-{number}" for number in broken}
    bench.probe(pairs_with(1, 2, 3, 4), nodes=5)._pairs(bench.store)  # type: ignore[arg-type]
    lines = [line for line in bench.lines if line.status != "begun"]
    assert [line.status for line in lines] == expected and [line.peer for line in lines] == [1, 2, 3, 4]
    assert {line.text for line in lines if line.status == "failed"} == {"no route"}
    gave_up = "skipped" in expected
    assert bench.store.values.get("out/0") == ("1" if gave_up else None)
    if gave_up:
        assert lines[-1].text == "this host could not reach the hosts before"


def test_host_that_has_given_up_is_not_waited_for(bench: Bench) -> None:
    bench.store.set("out/1", "1")
    probe = bench.probe(pairs_with(1, 2), nodes=3)
    probe._pairs(bench.store)  # type: ignore[arg-type]
    assert bench.told() == [("pair", "skipped", 1), ("pair", "begun", 2), ("pair", "done", 2)]
    assert bench.lines[0].text == "the other host could not reach anyone" and (probe.succeeded, probe.failed) == (1, 0)


@pytest.mark.parametrize(
    ("ready", "no_all", "failed", "succeeded", "told", "text"),
    [
        (3, False, 0, 1, ["begun", "done"], ""),
        (3, False, 1, 1, ["begun", "done"], ""),
        (2, False, 0, 1, ["failed"], "not all ranks came this far"),
        (2, True, 0, 1, ["skipped"], "a host could not reach any other"),
        (3, True, 0, 1, ["skipped"], "a host could not reach any other"),
        (3, False, 1, 0, ["skipped"], "a host could not reach any other"),
        (3, False, 0, 0, ["begun", "done"], ""),
    ],
)
def test_all_ranks_measure_together_if_every_host_reaches_another(
    bench: Bench, ready: int, no_all: bool, failed: int, succeeded: int, told: list[str], text: str
) -> None:
    bench.store.add("ready", ready)
    if no_all:
        bench.store.set("no-all", "1")
    probe = bench.probe(rank=1, node=1)
    probe.failed, probe.succeeded = failed, succeeded
    probe._all(bench.store)  # type: ignore[arg-type]
    assert [line.status for line in bench.lines] == told and bench.lines[-1].text == text
    assert bench.groups == ([("all", 3, 4, False)] if "done" in told else [])
    assert bench.clock.now == pytest.approx({"failed": 5.0, "skipped": 0.0, "done": 1.0}[told[-1]], abs=0.05)


def test_single_host_has_no_measurement_of_all(bench: Bench) -> None:
    bench.probe(nodes=1)._all(bench.store)  # type: ignore[arg-type]
    assert bench.lines == [] and bench.store.values == {}


@pytest.mark.parametrize(("others", "waited_s"), [(3, 0.0), (2, 1.0)])
def test_rank_waits_a_second_for_the_others_before_it_ends(bench: Bench, others: int, waited_s: float) -> None:
    bench.store.add("left", others)
    process._leave(bench.store, 4, 1.0)  # type: ignore[arg-type]
    assert bench.clock.now == pytest.approx(waited_s, abs=0.02)


def test_time_without_a_core_is_that_of_the_thread_that_waited_longest(bench: Bench) -> None:
    waits = iter([{"1": 5.0, "2": 1.0}, {"1": 5.5, "2": 2.0, "3": 0.25}, {}, {"1": 9.0}])
    bench.monkeypatch.setattr(process, "_core_waits_s", lambda: next(waits))

    def measure() -> dict[str, float]:
        bench.clock.now += 4.0
        return {"x": 1.0}

    assert process._run_stage("gemm", -1, measure, lambda: "hot")
    assert process._run_stage("gemm", 3, measure)
    assert [line.values for line in bench.lines] == [{}, {"x": 1.0, WAITED: 0.25}, {}, {"x": 1.0, WAITED: 1.0}]
    assert [(line.peer, line.text) for line in bench.lines] == [(-1, ""), (-1, "hot"), (3, ""), (3, "")]


def test_waits_are_read_for_each_thread_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thread, text in {"11": "1 2500000000 3\n", "12": "5", "13": "1 x 3"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    monkeypatch.setattr(
        process, "Path", lambda path: SimpleNamespace(glob=lambda pattern: tmp_path.glob("*/schedstat"))
    )
    assert process._core_waits_s() == {"11": 2.5}


def test_line_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, bytes]] = []
    monkeypatch.setattr(os, "write", lambda *given: written.append(given))
    line = ProbeLine("pair", "begun", 3)
    process._write_line(line)
    assert written == [(1, line.line().encode())]


def test_single_rank_of_a_host_has_no_measurement_inside_it(bench: Bench) -> None:
    probe = bench.probe()
    probe.local_size = 1
    probe._inside(bench.store)  # type: ignore[arg-type]
    assert bench.lines == [] and bench.groups == []


@pytest.mark.parametrize(("only", "leave_s"), [("", 1.0), ("all", 1.0), ("pairs", 11.0)])
def test_ranks_that_measure_only_pairs_wait_for_the_slowest_of_them(bench: Bench, only: str, leave_s: float) -> None:
    left: list[Any] = []
    for name in ("_alone", "_inside", "_pairs", "_all"):
        bench.monkeypatch.setattr(Probe, name, lambda *_: None)
    bench.monkeypatch.setattr(process, "TCPStore", lambda *given, **options: bench.store)
    bench.monkeypatch.setattr(process, "_leave", lambda *given: left.append(given))
    bench.monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    bench.monkeypatch.setenv("MASTER_PORT", "4000")
    bench.probe(pairs_with(1, 2), only=only).run()
    assert left == [(bench.store, 4, leave_s)]


def test_gpu_is_set_copied_to_and_asked_why_it_is_slow(bench: Bench) -> None:
    done: list[Any] = []
    device = torch.device("cuda", 1)
    bench.monkeypatch.setattr("ddptrain.nvml.throttle_reasons_of", lambda name: ["hot", f"power of {name}"])
    bench.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,MIG-u-1")
    bench.monkeypatch.setattr(torch.cuda, "set_device", done.append)

    def copy_gb_s(of: torch.device, seconds: float) -> float:
        assert of == device
        bench.clock.sleep(1.0)
        return 100 * seconds

    bench.monkeypatch.setattr(process, "copy_gb_s", copy_gb_s)
    assert bench.probe(rank=1).device == torch.device("cpu") and bench.probe()._throttled() == ""
    probe = bench.probe(rank=1)
    probe.plan = dataclasses.replace(probe.plan, gpu=True)
    gpu = Probe(probe.plan)
    assert gpu.device == device
    gpu._alone()
    assert bench.told() == [(name, status, -1) for name in ("gemm", "copy") for status in ("begun", "done")]
    gemm, copy = bench.lines[1::2]
    assert gemm.text == "hot, power of MIG-u-1" and gemm.values["gflops"] == 2.0
    assert copy.text == "" and copy.values["gb_s"] == 30.0 and done == []
    bench.monkeypatch.setattr(process, "TCPStore", lambda *given, **options: 1 / 0)
    bench.monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    bench.monkeypatch.setenv("MASTER_PORT", "4000")
    with pytest.raises(ZeroDivisionError):
        gpu.run()
    assert done[0] == device
