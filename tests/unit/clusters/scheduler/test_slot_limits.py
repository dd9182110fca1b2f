"""The slot table at its limits: times, topics, workers that shrink or are unknown, and each field of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain import log
from ddptrain.clusters.scheduler import slots
from ddptrain.protocol.rank_spec import GPU_RESOURCE
from ddptrain.worker.rank_task import topic
from tests.unit.clusters.scheduler.fake_scheduler import FakeScheduler, ask


class Clock:
    """The times of the slot table: `time` and `monotonic` seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(slots, "time", made)
    return made


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def waiting(there: Any) -> list[str]:
    return [each["run_id"] for each in slots.overview(there)["waiting"]]


def test_driver_stays_in_the_queue_as_long_as_it_asks_every_30_seconds(
    clock: Clock, loop: asyncio.AbstractEventLoop
) -> None:
    there: Any = FakeScheduler(loop, a=1)
    ask(there, "r1")
    ask(there, "r2", in_line=True)
    for _ in range(3):
        assert ask(there, "r3", in_line=True)["refusal"]["place"] == 2
        assert ask(there, "r2", in_line=True)["refusal"]["place"] == 1
        clock.now += 29.9
    ask(there, "r3", in_line=True)
    assert waiting(there) == ["r2", "r3"]
    clock.now += 0.1
    ask(there, "r3", in_line=True)
    assert waiting(there) == ["r3"]


def test_overview_has_the_seconds_of_each_wait_and_of_each_worker(
    clock: Clock, loop: asyncio.AbstractEventLoop
) -> None:
    there: Any = FakeScheduler(loop, b=1, a=1)
    there.workers["tcp://a"].last_seen = clock.now - 1.23456
    ask(there, "r2", 1)
    ask(there, "r1", 1)
    ask(there, "r3", None, in_line=True)
    clock.now += 2.34
    seen = slots.overview(there)
    assert seen["waiting"] == [{"run_id": "r3", "asked": None, "waited_s": 2.3}]
    assert [(each["name"], each["host"], each["last_seen_s"]) for each in seen["workers"]] == [
        ("a", "a", 3.575),
        ("b", "b", 1002.34),
    ]
    assert [each["run_id"] for each in seen["runs"]] == ["r1", "r2"]


def test_overview_of_a_cluster_without_runs_adds_nothing_to_the_scheduler(loop: asyncio.AbstractEventLoop) -> None:
    there: Any = FakeScheduler(loop, a=0, b=None, c=2)
    there.workers["tcp://c"].resources[GPU_RESOURCE] = 1.0
    there.workers["tcp://c"].metrics["ddptrain"] = "?"
    seen = slots.overview(there)
    assert [(each["slots"], each["gpus"], each["held"], each["warm"]) for each in seen["workers"]] == [
        (0, 0, 0, True),
        (1, 0, 0, None),  # until a run has asked for its offer
        (2, 1, 0, None),
    ]
    assert (seen["runs"], seen["waiting"], there.plugins) == ([], [], {}) and not slots.is_busy(there)


@pytest.mark.parametrize(
    ("workers", "count", "expected"),
    [
        ({}, None, {"asked": 1, "free": 0, "total": 0, "place": 0, "holders": (), "hosts": {}, "of_any_kind": 0}),
        (
            {"a": 1},
            3,
            {"asked": 3, "free": 1, "total": 1, "place": 0, "holders": (), "hosts": {"a": 1}, "of_any_kind": 1},
        ),
        (
            {"a1": 2, "a2": 1},
            4,
            {"asked": 4, "free": 3, "total": 3, "place": 0, "holders": (), "hosts": {"a": 3}, "of_any_kind": 3},
        ),
    ],
)
def test_refusal_has_all_that_is_known(
    loop: asyncio.AbstractEventLoop, workers: dict[str, int], count: int | None, expected: dict[str, Any]
) -> None:
    there: Any = FakeScheduler(loop, **workers)
    assert ask(there, "r1", count, in_line=True) == {"refusal": expected}


def test_the_only_slot_is_all_slots(loop: asyncio.AbstractEventLoop) -> None:
    there: Any = FakeScheduler(loop, a=1)
    assert ask(there, "r1", None)["slots"] == [["tcp://a", "a", 0, False, True]]


def test_request_that_can_be_met_no_more_leaves_the_queue(loop: asyncio.AbstractEventLoop) -> None:
    there: Any = FakeScheduler(loop, a=1, b=1)
    ask(there, "r1", 1)
    assert ask(there, "r2", 2, in_line=True)["refusal"]["place"] == 1
    there.workers.pop("tcp://b")
    there.table.remove_worker(there, "tcp://b")
    assert ask(there, "r2", 2, in_line=True)["refusal"]["place"] == 0 and waiting(there) == []


def test_cluster_is_busy_while_a_driver_waits(loop: asyncio.AbstractEventLoop) -> None:
    there: Any = FakeScheduler(loop, a=1)
    ask(there, "r1")
    ask(there, "r2", in_line=True)
    slots.release("r1", there)
    assert slots.is_busy(there) and there.table.grants == {}
    slots.release("r2", there)
    assert not slots.is_busy(there)


def test_table_that_was_replaced_removes_nothing(loop: asyncio.AbstractEventLoop) -> None:
    there: Any = FakeScheduler(loop, a=1)
    ask(there, "r1")
    old, new = there.table, object()
    there.plugins[slots.PLUGIN_NAME] = new
    old.release("r1")
    assert there.plugins == {slots.PLUGIN_NAME: new}


# --- topics and orders to workers ---


class Loop:
    """Stands for the event loop of a scheduler: notes what is to be called later."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, function: Any) -> None:
        self.later.append((seconds, function))


class Order:
    """An order to workers that is answered when the test says so."""

    def __init__(self) -> None:
        self.loop, self.callbacks = Loop(), list[Any]()

    def add_done_callback(self, function: Any) -> None:
        self.callbacks.append(function)

    def get_loop(self) -> Loop:
        return self.loop

    def answer(self) -> None:
        for function in self.callbacks:
            function(self)


def with_topics(there: Any, *runs: str) -> dict[str, Any]:
    found = {name: SimpleNamespace(subscribers={"gone"}) for run in runs for name in (topic(run), log.topic(run))}
    there._broker, there.clients = SimpleNamespace(_topics=found), {}
    return found


def test_topics_go_a_second_after_the_workers_have_answered(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: Any = FakeScheduler(loop, a=1)
    topics, order = with_topics(there, "r1", "r2"), Order()
    monkeypatch.setattr(there, "broadcast", lambda **sent: sent)
    monkeypatch.setattr(asyncio, "ensure_future", lambda sent: order)
    ask(there, "r1")
    table = there.table
    table.release("r1")
    assert table._removals == {order}, "or it could be collected before it is answered"
    order.answer()
    ((seconds, forget),) = order.loop.later
    assert seconds == 1.0 and table._removals == set() and topic("r1") in topics
    forget()
    assert topics.keys() == {topic("r2"), log.topic("r2")}


def test_topics_of_a_run_without_workers_go_at_once(loop: asyncio.AbstractEventLoop) -> None:
    there: Any = FakeScheduler(loop, a=1, b=1)
    topics = with_topics(there, "r1", "r2")
    ask(there, "r1")
    ask(there, "r2")
    there.workers.clear()
    there.table.remove_client(there, "client-r1")
    assert topics.keys() == {topic("r2"), log.topic("r2")} and there.orders == []


def test_topics_of_a_run_without_slots_are_deleted_with_its_place(loop: asyncio.AbstractEventLoop) -> None:
    there: Any = FakeScheduler(loop, a=1)
    topics = with_topics(there, "r1", "r2")
    slots.release("r1", there)
    assert topics.keys() == {topic("r2"), log.topic("r2")} and there.plugins == {}
    del there._broker
    slots.release("r2", there)  # a scheduler without topics is fine


@pytest.mark.parametrize("listens", [True, False])
def test_topic_is_kept_for_a_driver_that_listens(loop: asyncio.AbstractEventLoop, listens: bool) -> None:
    there: Any = FakeScheduler(loop, a=1)
    topics = with_topics(there, "r1")
    there.clients = {"new": None}
    if listens:
        topics[topic("r1")].subscribers.add("new")
    slots._forget_unheard_topic(there, "r1")
    assert len(topics) == (2 if listens else 0)
    topics.pop(topic("r1"), None)
    slots._forget_unheard_topic(there, "r1")
    assert topics == {}
    del there._broker
    slots._forget_unheard_topic(there, "r1")
