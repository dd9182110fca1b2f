"""The table of slots: all or none, never twice, and free again when the holder goes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.clusters.scheduler import slots
from ddptrain.errors import ClusterError
from tests.support import fake_time
from tests.unit.clusters.scheduler.fake_scheduler import FakeScheduler, ask

LOOP = asyncio.new_event_loop()  # of the scheduler


def scheduler(**workers: int | None) -> Any:
    return FakeScheduler(LOOP, **workers)


@pytest.fixture(scope="module", autouse=True)
def event_loop() -> Iterator[None]:
    yield
    LOOP.close()


def test_gang_gets_all_its_slots_or_none() -> None:
    there = scheduler(a=2, b=1)
    assert "refusal" in ask(there, "r1", 4)
    assert len(ask(there, "r1", 3)["slots"]) == 3


def test_second_gang_is_told_who_holds_the_slots() -> None:
    there = scheduler(a=2)
    ask(there, "r1", 2)
    refusal = ask(there, "r2", 1)["refusal"]
    assert (refusal["free"], refusal["total"], refusal["place"]) == (0, 2, 0)
    ((run, count, since),) = refusal["holders"]
    assert (run, count) == ("r1", 2) and abs(time.time() - since) < 60.0


def test_run_that_requests_more_slots_is_not_named_as_their_holder() -> None:
    there = scheduler(a=3)
    ask(there, "r1", 2)
    ask(there, "r2", 1)
    refusal = ask(there, "r1", 3)["refusal"]
    assert (refusal["free"], [run for run, *_ in refusal["holders"]]) == (2, ["r2"])


def test_gang_stays_on_one_host_where_it_fits() -> None:
    there = scheduler(a1=2, b1=2, b2=2)
    assert {slot[1] for slot in ask(there, "r1", 4)["slots"]} == {"b"}


def test_ranks_of_a_host_stand_together() -> None:
    there = scheduler(a1=1, b1=1, a2=1, b2=1)
    hosts = [slot[1] for slot in ask(there, "r1", 4)["slots"]]
    assert hosts in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_no_number_asks_for_every_slot() -> None:
    assert len(ask(scheduler(a=2, b=3), "r1", None)["slots"]) == 5


def test_slots_of_a_driver_that_died_are_free() -> None:
    there = scheduler(a=2)
    ask(there, "r1", 2)
    there.table.remove_client(there, "client-r1")
    assert "slots" in ask(there, "r2", 2)


def test_slots_of_a_lost_worker_are_gone() -> None:
    there = scheduler(a=1, b=1)
    ask(there, "r1", 2)
    there.workers.pop("tcp://a")
    there.table.remove_worker(there, "tcp://a")
    assert ask(there, "r2", 2)["refusal"]["total"] == 1
    assert all(slot.worker == "tcp://b" for slot in there.table.holders)


def test_line_is_served_in_order() -> None:
    there = scheduler(a=2)
    ask(there, "r1", 2)
    assert [ask(there, run, 1, in_line=True)["refusal"]["place"] for run in ("r2", "r3", "r2")] == [1, 2, 1]
    slots.release("r1", there)
    assert "refusal" in ask(there, "r3", 1, in_line=True)  # r2 comes first, and r3 waits for it
    assert "slots" in ask(there, "r2", 1, in_line=True)
    assert "slots" in ask(there, "r3", 1, in_line=True)


def test_higher_priority_is_served_first_and_nobody_passes_the_first() -> None:
    there = scheduler(a=2)
    ask(there, "r1", 2)
    ask(there, "low", 1, in_line=True)
    ask(there, "large", 2, in_line=True, priority=5)
    assert ask(there, "small", 1, in_line=True, priority=5)["refusal"]["place"] == 2
    assert ask(there, "low", 1, in_line=True)["refusal"]["place"] == 3
    assert [(each["run_id"], each["priority"]) for each in slots.overview(there)["waiting"]] == [
        ("large", 5),
        ("small", 5),
        ("low", 0),
    ]
    slots.release("r1", there)
    ask(there, "urgent", 1, priority=9)  # it does not wait, and passes those of lower priority
    assert ask(there, "small", 1, in_line=True, priority=5)["refusal"]["free"] == 1, "large waits for it, too"
    assert "refusal" in ask(there, "low", 1)
    slots.release("urgent", there)
    assert "slots" in ask(there, "large", 2, in_line=True, priority=5)


def test_who_does_not_wait_does_not_pass_those_who_do() -> None:
    there = scheduler(a=2)
    ask(there, "r1", 1)
    ask(there, "large", 2, in_line=True)
    refusal = ask(there, "r2", 1)["refusal"]
    assert (refusal["free"], refusal["place"]) == (1, 0)


def test_request_that_can_never_be_met_holds_up_nobody() -> None:
    there = scheduler(a=2)
    assert ask(there, "huge", 9, in_line=True)["refusal"]["place"] == 0
    assert "slots" in ask(there, "r2", 2)


def test_driver_that_died_leaves_the_line() -> None:
    there = scheduler(a=1)
    ask(there, "r1", 1)
    ask(there, "r2", 1, in_line=True)
    assert ask(there, "r3", 1, in_line=True)["refusal"]["place"] == 2
    there.table.remove_client(there, "client-r2")
    assert ask(there, "r3", 1, in_line=True)["refusal"]["place"] == 1


def test_waiter_that_says_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    there = scheduler(a=1)
    ask(there, "r1", 1)
    ask(there, "silent", 1, in_line=True)
    slots.release("r1", there)
    later = time.monotonic() + 60.0
    fake_time.replace(monkeypatch, "monotonic", lambda: later)
    assert "slots" in ask(there, "r2", 1)


def test_worker_of_others_is_asked_first_what_it_offers() -> None:
    there = scheduler(a=None, b=None)
    assert ask(there, "r1", None)["unknown"] == ["tcp://a", "tcp://b"]
    slots.learn({"tcp://a": (1, 1), "tcp://b": (1, 0)}, there)
    assert ask(there, "r1", None)["slots"] == [["tcp://a", "a", 0, True, False], ["tcp://b", "b", 0, False, False]]


def test_only_slots_with_a_gpu_are_given_where_they_are_asked_for() -> None:
    there = scheduler(a=None, b=None)
    slots.learn({"tcp://a": (1, 0), "tcp://b": (1, 1)}, there)
    assert [slot[0] for slot in ask(there, "r1", 1, gpus_only=True)["slots"]] == ["tcp://b"]
    refusal = ask(there, "r2", 2, gpus_only=True)["refusal"]
    assert (refusal["total"], refusal["of_any_kind"]) == (1, 2)
    avoided = ask(there, "r3", 2, gpus_only=True, without=list(there.workers))["refusal"]
    assert (avoided["total"], avoided["of_any_kind"]) == (0, 0)


def test_last_run_takes_the_book_along() -> None:
    there = scheduler(a=2)
    ask(there, "r1", 1)
    ask(there, "r2", 1)
    slots.release("r1", there)
    assert slots.is_busy(there)
    there.table.remove_client(there, "client-r2")
    assert there.plugins == {} and not slots.is_busy(there)


@pytest.mark.parametrize("died", [True, False])
def test_run_that_leaves_takes_its_plugin_from_its_workers(died: bool) -> None:
    there = scheduler(a=1, b=1)
    ask(there, "r1", 1)

    worker_of_r1 = next(iter(there.table.holders)).worker
    if died:
        there.table.remove_client(there, "client-r1")
    else:
        slots.release("r1", there)
    assert there.orders == [("ddptrain-r1", [worker_of_r1])]


def test_run_that_asks_again_gets_other_slots_for_its_own_and_passes_the_line() -> None:
    there = scheduler(a=2, b=2)
    first = ask(there, "r1", 4)["slots"]
    ask(there, "r2", 1, in_line=True)
    assert ask(there, "r1", 4)["slots"] == first
    there.workers.pop("tcp://a")
    there.table.remove_worker(there, "tcp://a")
    assert ask(there, "r1", 4)["refusal"]["total"] == 2  # and keeps what it has
    assert [slot[0] for slot in ask(there, "r1", 2)["slots"]] == ["tcp://b", "tcp://b"]
    slots.release("r1", there)
    assert there.orders == [("ddptrain-r1", ["tcp://b"])]


def test_paused_worker_gives_no_slots_until_it_runs_again() -> None:
    there = scheduler(a=2, b=1)
    there.workers["tcp://a"].status.name = "paused"
    refusal = ask(there, "r1", 2)["refusal"]
    assert (refusal["free"], refusal["total"], refusal["hosts"]) == (1, 1, {"b": 1})
    assert ask(there, "r1", None)["slots"] == [["tcp://b", "b", 0, False, True]]
    there.workers["tcp://a"].status.name = "running"
    assert [slot[:3] for slot in ask(there, "r2", 2)["slots"]] == [["tcp://a", "a", 0], ["tcp://a", "a", 1]]


def test_paused_worker_of_others_is_not_asked_what_it_offers() -> None:
    there = scheduler(a=None, b=1)
    there.workers["tcp://a"].status.name = "paused"
    assert ask(there, "r1", None)["slots"] == [["tcp://b", "b", 0, False, True]]


def test_last_offer_of_a_worker_that_stays_counts() -> None:
    there = scheduler(a=None)
    slots.learn({"tcp://a": (3, 0)}, there)
    slots.learn({"tcp://a": (2, 0)}, there)
    assert len(ask(there, "r1", None)["slots"]) == 2


def test_workers_that_a_run_does_not_want_are_left_to_others() -> None:
    there = scheduler(a=2, b=1)
    refusal = ask(there, "r1", 2, without=["tcp://a"])["refusal"]
    assert (refusal["free"], refusal["total"], refusal["hosts"]) == (1, 1, {"b": 1})
    assert ask(there, "r1", None, without=["tcp://a"])["slots"] == [["tcp://b", "b", 0, False, True]]
    assert [slot[0] for slot in ask(there, "r2", 2)["slots"]] == ["tcp://a", "tcp://a"]


def test_run_whose_workers_are_all_lost_is_still_known() -> None:
    there = scheduler(a=1)
    ask(there, "r1", 1)
    there.table.remove_worker(there, "tcp://a")
    assert slots.is_busy(there)
    there.table.remove_client(there, "client-r1")
    assert not slots.is_busy(there)


@pytest.mark.parametrize("ends", ["connection", "release"])
def test_run_that_another_driver_has_resumed_keeps_its_slots_at_the_end_of_the_first(ends: str) -> None:
    there = scheduler(a=2)
    slots.reserve("client-1", "r1", 2, there, lost_after_s=None)
    slots.reserve("client-2", "r1", 2, there, lost_after_s=None)
    if ends == "connection":
        there.table.remove_client(there, "client-1")
    else:
        slots.release("r1", there, client="client-1")
    assert there.orders == [] and slots.overview(there)["runs"][0]["slots"] == 2
    assert "refusal" in ask(there, "r2", 1)
    slots.release("r1", there, client="client-2")
    assert there.orders == [("ddptrain-r1", ["tcp://a"])] and not slots.is_busy(there)


def test_run_that_another_driver_has_resumed_in_the_line_keeps_its_place() -> None:
    there = scheduler(a=1)
    ask(there, "r1", 1)
    for client in ("client-1", "client-2"):
        slots.reserve(client, "r2", 1, there, in_line=True)
    there.table.remove_client(there, "client-1")
    assert [waiter["run_id"] for waiter in slots.overview(there)["waiting"]] == ["r2"]


def test_cluster_that_ends_gives_no_slots() -> None:
    there = scheduler(a=2)
    ask(there, "r1", 1)
    assert slots.close(there)["runs"][0]["run_id"] == "r1"
    assert "slots" in ask(there, "r2", 1), "it is in use, so it does not end"
    for run in ("r1", "r2"):
        slots.release(run, there)
    assert slots.close(there)["runs"] == []
    with pytest.raises(ClusterError, match="is ending this cluster"):
        ask(there, "r3", 1)


def test_overview_tells_who_holds_what_and_who_waits() -> None:
    there = scheduler(a=2, b=None)
    slots.learn({"tcp://b": (1, 0)}, there)
    ask(there, "r1", 2)
    ask(there, "r2", 2, in_line=True)
    seen = slots.overview(there)
    assert [(each["address"], each["slots"], each["held"], each["warm"]) for each in seen["workers"]] == [
        ("tcp://a", 2, 2, True),
        ("tcp://b", 1, 0, None),
    ]
    assert [(each["run_id"], each["slots"], each["hosts"]) for each in seen["runs"]] == [("r1", 2, ["a"])]
    assert [(each["run_id"], each["asked"]) for each in seen["waiting"]] == [("r2", 2)]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.sampled_from(["ask", "wait", "leave"])), max_size=30
    )
)
def test_no_order_of_requests_gives_a_slot_twice(requests: list[tuple[str, int, str]]) -> None:
    there = scheduler(a=3, b=3, c=1)
    held: Counter[str] = Counter()
    for run, count, what in requests:
        if what == "leave":
            slots.release(run, there)
            held.pop(run, None)
            continue
        holders = there.table.holders if there.plugins else {}
        others = {slot for slot, holder in holders.items() if holder.run_id != run}
        answer = ask(there, run, count, in_line=what == "wait")
        if "slots" in answer:
            got = {slots.Slot(*slot) for slot in answer["slots"]}
            assert len(got) == count and not got & others
            held[run] = count
    assert sum(held.values()) <= 7
    assert (len(there.table.holders) if there.plugins else 0) == sum(held.values())


def test_scheduler_follows_the_longest_cut_that_a_run_on_it_wants_to_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[float] = []
    monkeypatch.setattr(slots, "apply_tcp_timeout", lambda _, lost_after_s: followed.append(lost_after_s))
    there = scheduler(a=3)
    assert "lost_after_s" not in ask(there, "r0")
    assert ask(there, "r1", lost_after_s=20.0)["lost_after_s"] == 20.0
    assert ask(there, "r2", lost_after_s=90.0)["lost_after_s"] == 90.0
    slots.release("r2", there)
    assert there.table.lost_after_s == 20.0
    assert ask(there, "r3", lost_after_s=5.0)["lost_after_s"] == 20.0
    assert followed == [20.0, 90.0, 20.0]
