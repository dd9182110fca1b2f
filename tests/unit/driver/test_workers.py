"""The worker group with a stand-in for Dask's client: whom it avoids, and which messages it takes."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from dask.highlevelgraph import HighLevelGraph

from ddptrain.clusters.scheduler import slots
from ddptrain.driver.inbox import Inbox, TaskFailed, WorkerLost
from ddptrain.driver.reservation import SlotRequest, WaitHooks
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError
from ddptrain.protocol import worker_notices
from ddptrain.worker.rank_task import run_ranks
from tests.unit.specs import make_spec

WORKERS = ("tcp://h0:1", "tcp://h1:1", "tcp://h2:1")
WISH = SlotRequest(2, False, 5.0, 0.0)


class FakeFuture:
    """A task whose end the test decides."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.status = "pending"
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def exception(self) -> Exception:
        return RuntimeError("no rank server")

    def end(self, status: str) -> None:
        self.status = status
        for callback in self.callbacks:
            callback(self)


class FakeClient:
    """Three workers with a slot each, on a scheduler that gives away what is not avoided."""

    id = "client-1"
    status = "running"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scheduler = type("Scheduler", (), {"address": "tcp://s:1"})
        self.asked: list[dict[str, Any]] = []
        self.written: list[tuple[str, int, bytes]] = []
        self.submitted: list[tuple[list[str], str, list[int], dict[str, int] | None]] = []
        self.messages = 0
        self.silent = False

    def nthreads(self) -> dict[str, int]:
        return dict.fromkeys(WORKERS, 1)

    def run_on_scheduler(self, function: object, *args: Any, **kwargs: Any) -> dict[str, Any]:
        assert (function, args[:2]) == (slots.reserve, ("client-1", "r-1"))
        self.asked.append(kwargs)
        free = [worker for worker in WORKERS if worker not in kwargs["without"]]
        return {"slots": [(worker, worker[6:8], 0, False, True) for worker in free[: args[2]]], "lost_after_s": None}

    def run(self, function: Any, *args: Any, workers: list[str], **_: Any) -> dict[str, Any]:
        if function.__name__ == "write_spool":
            self.written.append(args[1:])
            return dict.fromkeys(workers, f"/remote/{args[1]}")
        about = {"scratch": str(self.folder), "token": "t", "gpus": "", "hostname": "name", "interface": ""}
        error = ConnectionError("cut")
        return dict.fromkeys(workers, error if self.silent else about)

    def get(self, graph: HighLevelGraph, keys: list[str], *, sync: bool) -> list[FakeFuture]:
        assert not sync
        for key in keys:
            layer = graph.layers[key]
            ((function, specs),) = layer.values()
            assert function is run_ranks
            annotations = layer.annotations or {}
            assert annotations["allow_other_workers"] is False
            ranks = [json.loads(spec)["rank"] for spec in specs]
            self.submitted.append((annotations["workers"], key, ranks, annotations.get("resources")))
        self.messages += 1
        return [FakeFuture(key) for key in keys]


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def client(tmp_path: Path) -> FakeClient:
    (tmp_path / "token").write_text("t")
    return FakeClient(tmp_path)


@pytest.fixture
def worker_group(client: FakeClient, inbox: Inbox) -> Workers:
    return Workers(cast("Any", client), "r-1", inbox)


def reserved(worker_group: Workers) -> list[str]:
    watchers = WaitHooks(None, lambda: None, lambda: "", lambda _: None, "")
    return [place.slot.worker for place in worker_group.reserve(WISH, watchers)]


def test_next_reservation_avoids_a_worker_that_leaves_or_is_lost(worker_group: Workers, client: FakeClient) -> None:
    assert reserved(worker_group) == ["tcp://h0:1", "tcp://h1:1"]
    worker_group.avoid("tcp://h0:1")
    assert worker_group.has("tcp://h0:1")  # it leaves: it still answers
    assert reserved(worker_group) == ["tcp://h1:1", "tcp://h2:1"]
    worker_group.forget("tcp://h1:1")
    assert not worker_group.has("tcp://h1:1")
    assert reserved(worker_group) == ["tcp://h2:1"]
    assert [asked["without"] for asked in client.asked] == [[], ["tcp://h0:1"], ["tcp://h0:1", "tcp://h1:1"]]


@pytest.mark.parametrize(("wait_s", "in_line"), [(0.0, False), (0.5, True), (60.0, True)])
@pytest.mark.parametrize("foreign", [False, True])
def test_scheduler_is_asked_for_slots_as_the_run_requests_them(
    client: FakeClient, inbox: Inbox, *, wait_s: float, in_line: bool, foreign: bool
) -> None:
    asking = Workers(cast("Any", client), "r-1", inbox, 33.0, foreign=foreign)
    asking.avoid("tcp://h1:1")
    asking.reserve(SlotRequest(2, True, 5.0, wait_s), WaitHooks(None, lambda: None, lambda: "", lambda _: None, ""))
    assert client.asked == [
        {
            "gpus_only": True,
            "in_line": in_line,
            "without": ["tcp://h1:1"],
            "lost_after_s": None if foreign else 33.0,
        }
    ]


def test_worker_that_comes_back_is_avoided_no_longer(worker_group: Workers, inbox: Inbox) -> None:
    worker_group._on_all((1.0, {"action": "remove-worker", "worker": "tcp://h0:1"}))
    assert inbox.get_nowait() == WorkerLost("tcp://h0:1")
    assert reserved(worker_group) == ["tcp://h1:1", "tcp://h2:1"]
    worker_group._on_all((1.0, {"action": "add-worker", "worker": "tcp://h0:1"}))
    assert reserved(worker_group) == ["tcp://h0:1", "tcp://h1:1"] and worker_group.has("tcp://h0:1")
    worker_group._on_all((1.0, "noise"))
    assert inbox.empty()


def test_places_say_where_ranks_run_and_whether_the_driver_sees_their_files(
    worker_group: Workers, client: FakeClient
) -> None:
    places = worker_group.reserve(WISH, WaitHooks(None, lambda: None, lambda: "", lambda _: None, ""))
    assert [(place.rank, place.local_rank, place.node_rank, place.host, place.shared) for place in places] == [
        (0, 0, 0, "name (h0)", True),
        (1, 0, 1, "name (h1)", True),
    ]
    (client.folder / "token").write_text("another")
    assert not worker_group.reserve(WISH, WaitHooks(None, lambda: None, lambda: "", lambda _: None, ""))[0].shared


def test_worker_that_does_not_answer_is_named(worker_group: Workers, client: FakeClient) -> None:
    client.silent = True
    with pytest.raises(ClusterError, match="the Dask worker tcp://h0:1 of host h0 does not answer: cut"):
        reserved(worker_group)


def test_valid_notices_reach_the_inbox_and_others_are_counted(worker_group: Workers, inbox: Inbox) -> None:
    notice = worker_notices.Growth(1, 0, 10, 20)
    worker_group._on_notice((1.0, {**worker_notices.encode(notice), "worker": "tcp://h0:1"}))
    assert inbox.get_nowait() == notice
    wrong: list[object] = [{"rank": "x"}, None, "text", {"notice": "growth"}, {"notice": {}}, [1], {1: 2}]
    for message in wrong:
        worker_group._on_notice((1.0, message))
    worker_group._on_notice((1.0, {"ping": ["not", "hashable"]}))
    assert inbox.empty() and worker_group.rejected == 7
    assert worker_group.first_rejected == "unknown kind a value of type NoneType"


@pytest.mark.parametrize(
    ("status", "connection", "text"),
    [
        ("error", "running", "no rank server"),
        ("cancelled", "connecting", "the Dask scheduler has ended, or the network to it is down: tcp://s:1"),
        ("cancelled", "running", "its Dask task was cancelled: has somebody restarted the cluster's workers?"),
        ("finished", "running", ""),
    ],
)
def test_end_of_a_task_is_a_message_if_it_failed(
    worker_group: Workers, client: FakeClient, inbox: Inbox, status: str, connection: str, text: str
) -> None:
    client.status = connection
    worker_group.submit([make_spec(rank=1, attempt=2)], [slots.Slot("tcp://h0:1", "h0", 0, False, True)])
    cast("Any", worker_group.futures[1]).end(status)
    assert (None if inbox.empty() else inbox.get_nowait()) == (TaskFailed(2, 1, text) if text else None)


def test_ranks_of_one_worker_are_one_task_which_fails_for_all_of_them(
    worker_group: Workers, client: FakeClient, inbox: Inbox
) -> None:
    specs = [make_spec(rank=rank) for rank in range(4)]
    where = [("tcp://h0:1", 0), ("tcp://h0:1", 1), ("tcp://h1:1", 0), ("tcp://h0:1", 2)]
    worker_group.submit(specs, [slots.Slot(worker, worker[6:8], index, False, True) for worker, index in where])
    assert client.submitted == [
        (["tcp://h0:1"], specs[0].key, [0, 1, 3], {"slot": 3}),
        (["tcp://h1:1"], specs[2].key, [2], {"slot": 1}),
    ]
    assert client.messages == 1
    cast("Any", worker_group.futures[3]).end("error")
    assert [inbox.get_nowait() for _ in range(3)] == [TaskFailed(1, rank, "no rank server") for rank in (0, 1, 3)]
    assert inbox.empty()


def test_one_message_may_have_several_notices_some_of_them_wrong(worker_group: Workers, inbox: Inbox) -> None:
    notices: list[worker_notices.Notice] = [worker_notices.Growth(1, 0, 10, 20), worker_notices.Broken(1, 1, "gone")]
    message = worker_notices.encode_all(notices)
    worker_group._on_notice((1.0, {"notices": [message["notices"][0], {"notice": "growth"}, message["notices"][1]]}))
    assert [inbox.get_nowait(), inbox.get_nowait()] == notices
    assert inbox.empty() and worker_group.rejected == 1
    worker_group._on_notice((1.0, {"notices": "text"}))
    assert inbox.empty() and worker_group.rejected == 2


def test_end_of_a_task_of_an_earlier_attempt_is_no_message(worker_group: Workers, inbox: Inbox) -> None:
    worker_group.submit([make_spec(rank=1)], [slots.Slot("tcp://h0:1", "h0", 0, False, True)])
    earlier = cast("Any", worker_group.futures[1])
    worker_group.submit([make_spec(rank=1, attempt=2)], [slots.Slot("tcp://h0:1", "h0", 0, False, True)])
    earlier.end("cancelled")
    assert inbox.empty()
