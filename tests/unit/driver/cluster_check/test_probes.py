"""What the driver does with the ranks that measure: their start, their end, and what it reads of them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.attempt.inbox import ResultsLost, TaskFailed, WorkerLost
from ddptrain.driver.cluster_check import probes
from ddptrain.driver.cluster_check.readings import RankReading
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.errors import ClusterError
from ddptrain.protocol.cluster_check import ProbeLine, ProbePlan
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.protocol.worker_notices import Broken, RankExit, StoreOpened
from ddptrain.worker.spool import READ_LIMIT_BYTES, rank_spool

PLAN = ProbePlan((), 1.0, 1.0, 1.0, 9.0, 1024, gpu=False)
LINE = ProbeLine("gemm", "done", values={"gflops": 5.0})


class Group:
    """A worker group: after each start of ranks, the messages of `after` for them arrive."""

    def __init__(self, scratch: Path, *after: Callable[[int], list[Any]]) -> None:
        self.run_id, self.connected = "r-1", True
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.places = [
            RankPlace(
                rank, 0, 1, rank, Slot(f"tcp://{name}", name, 0, False, True), name, scratch, rank != 1, f"gpu-{rank}"
            )
            for rank, name in enumerate("abc")
        ]
        self.started: list[tuple[RankSpec, Slot]] = []
        self.stopped: list[int] = []
        self.calls: list[str] = []
        self.logs: dict[int, bytes] = {}
        self._after = list(after)

    def sealed(self, specs: Sequence[RankSpec], places: Sequence[RankPlace]) -> Sequence[RankSpec]:
        assert [spec.rank for spec in specs] == [place.rank for place in places]
        return specs

    def submit(self, specs: Sequence[RankSpec], slots: Sequence[Slot]) -> None:
        self.started += zip(specs, slots, strict=True)
        for spec in specs:
            log = rank_spool(self.places[spec.rank].scratch, self.run_id, spec.attempt, spec.rank).log
            if spec.rank != 1 and spec.rank in self.logs:
                log.parent.mkdir(parents=True)
                log.write_bytes(self.logs[spec.rank])
        for message in self._after.pop(0)(specs[0].attempt):
            self.inbox.put(message)

    def fetch(self, worker: str, path: Path, offset: int, most: int) -> bytes:
        assert (worker, offset, most) == ("tcp://b", 0, READ_LIMIT_BYTES)
        if 1 not in self.logs:
            raise ClusterError("no answer")
        return self.logs[1]

    def stop(self, specs: Sequence[RankSpec], grace_s: float) -> None:
        assert grace_s == 0.0
        self.stopped += [spec.rank for spec in specs]

    def end_attempt(self) -> None:
        self.calls.append("end")

    def run(self, deadline_s: float = 60.0) -> list[RankReading]:
        group = cast(WorkerGroup, self)
        return probes.run_probes(group, self.places, PLAN, {"A": "1"}, deadline_s, lambda: self.calls.append("check"))


def ended(attempt: int, rank: int, status: int = 0) -> RankExit:
    return RankExit(attempt, rank, 1, status, 2, 0, 0)


@pytest.fixture(autouse=True)
def no_wait_for_killed_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_END_S", 0.0)


def test_other_ranks_start_once_the_first_one_has_opened_the_store(tmp_path: Path) -> None:
    group = Group(
        tmp_path,
        lambda attempt: [StoreOpened(attempt - 1, 0, 1), StoreOpened(attempt, 0, 4711), StoreOpened(attempt, 0, 5)],
        lambda attempt: [ended(attempt - 1, 0, 9), ended(attempt, 2), ended(attempt, 0), ended(attempt, 1, 3)],
    )
    group.logs = {0: LINE.line().encode(), 1: b"Traceback\nValueError: x\n" + LINE.line().encode(), 2: b"a warning"}
    assert group.run() == [
        RankReading(0, (LINE,), "gpu-0", ""),
        RankReading(1, (LINE,), "gpu-1", "exit code 3: ValueError: x"),
        RankReading(2, (), "gpu-2", ""),
    ]
    assert [(spec.rank, slot.host, spec.group.master_port) for spec, slot in group.started] == [
        (0, "a", 0),
        (1, "b", 4711),
        (2, "c", 4711),
    ]
    first = group.started[0][0]
    assert first.attempt >= 1_000_000 and len({spec.attempt for spec, _ in group.started}) == 1
    assert (first.run_id, first.env, first.code.workdir, first.code.built_in) == ("r-1", {"A": "1"}, "/", True)
    assert first.code.module == first.code.workload == "ddptrain.rank.cluster_check.process"
    assert first.code.args == (PLAN.to_json(),)
    assert (first.group.backend, first.group.timeout_s, first.group.master_addr) == ("gloo", 9.0, "a")
    assert (first.placement.world_size, first.supervision.grace_s) == (3, 0.0)
    assert group.stopped == [] and group.calls == ["check"] * 7 + ["end"]


def test_ranks_that_were_not_started_say_nothing_of_the_first_one_that_failed(tmp_path: Path) -> None:
    group = Group(tmp_path, lambda attempt: [Broken(attempt, 0, "no rank server")])
    assert group.run() == [
        RankReading(0, (), "gpu-0", "no rank server"),
        RankReading(1, (), "gpu-1"),
        RankReading(2, (), "gpu-2"),
    ]
    assert [spec.rank for spec, _ in group.started] == [0] and group.stopped == [1, 2]


def test_a_lost_worker_a_failed_task_and_a_log_that_is_gone_are_told(tmp_path: Path) -> None:
    group = Group(
        tmp_path,
        lambda attempt: [StoreOpened(attempt, 0, 1)],
        lambda attempt: [
            TaskFailed(attempt, 0, "task failed"),
            WorkerLost("tcp://c"),
            ended(attempt, 2, 4),
            WorkerLost("tcp://elsewhere"),
            ended(attempt, 1),
        ],
    )
    group.logs = {0: b"last words\n", 2: LINE.line().encode()}
    assert group.run() == [
        RankReading(0, (), "gpu-0", "task failed: last words"),
        RankReading(1, (), "gpu-1", "its log can't be read: no answer"),
        RankReading(2, (), "gpu-2", "its worker was lost"),
    ]


def test_ranks_that_do_not_end_are_stopped_and_what_they_measured_counts(tmp_path: Path) -> None:
    group = Group(tmp_path, lambda attempt: [])
    group.logs = {0: LINE.line().encode()}
    first, *others = group.run(-1.0)
    assert first == RankReading(0, (LINE,), "gpu-0", "it did not end within -1 s")
    assert others == [RankReading(1, (), "gpu-1"), RankReading(2, (), "gpu-2")]
    assert group.stopped == [0, 1, 2] and group.calls == ["end"]


def test_a_check_ends_with_the_scheduler_and_with_the_results(tmp_path: Path) -> None:
    group = Group(tmp_path, lambda attempt: [])
    group.connected = False
    with pytest.raises(ClusterError, match="the Dask scheduler is gone"):
        group.run()
    assert group.stopped == [0, 1, 2] and group.calls == ["end"]
    lost = Group(tmp_path, lambda attempt: [ResultsLost(ClusterError("disk full"))])
    with pytest.raises(ClusterError, match="disk full"):
        lost.run()
    assert lost.calls[-1] == "end"


def test_a_wait_without_a_message_is_short_and_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path, lambda attempt: [Broken(attempt, 0, "no rank server")])
    take, waits = group.inbox.get, iter([True, True, False])

    def get(*, timeout: float) -> Any:
        assert timeout == 0.1
        if next(waits):
            raise queue.Empty
        return take(block=False)

    monkeypatch.setattr(group.inbox, "get", get)
    assert group.run()[0].error == "no rank server"
    assert group.calls == ["check"] * 3 + ["end"]
