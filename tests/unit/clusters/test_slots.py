"""The book of slots: all or none, never twice, and free again when the holder goes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.clusters import slots
from ddptrain.clusters.slots import SlotBook


def scheduler(**workers: int) -> Any:
    """Workers by name: how many slots each has; a worker's host is the first letter of its name."""
    states = {
        f"tcp://{name}": SimpleNamespace(
            host=name[0], status=SimpleNamespace(name="running"), resources={"slot": float(count)}
        )
        for name, count in workers.items()
    }
    found = SimpleNamespace(workers=states, plugins={})
    book = SlotBook()
    book.scheduler = found  # type: ignore[assignment]
    found.plugins[slots.PLUGIN_NAME] = book
    return found


def test_gang_gets_all_its_slots_or_none() -> None:
    there = scheduler(a=2, b=1)
    assert slots.reserve("c1", "r1", 4, there)["slots"] is None
    assert slots.reserve("c1", "r1", 3, there)["free"] == 0


def test_second_gang_is_told_who_holds_the_slots() -> None:
    there = scheduler(a=2)
    slots.reserve("c1", "r1", 2, there)
    answer = slots.reserve("c2", "r2", 1, there)
    assert (answer["slots"], answer["free"], answer["total"], answer["holders"]) == (None, 0, 2, ["r1"])


def test_gang_stays_on_one_host_where_it_fits() -> None:
    there = scheduler(a1=2, b1=2, b2=2)
    hosts = {slot[1] for slot in slots.reserve("c1", "r1", 4, there)["slots"]}
    assert hosts == {"b"}


def test_ranks_of_a_host_stand_together() -> None:
    there = scheduler(a1=1, b1=1, a2=1, b2=1)
    hosts = [slot[1] for slot in slots.reserve("c1", "r1", 4, there)["slots"]]
    assert hosts in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_no_number_asks_for_every_slot() -> None:
    assert slots.reserve("c1", "r1", None, scheduler(a=2, b=3))["asked"] == 5


def test_slots_of_a_driver_that_died_are_free() -> None:
    there = scheduler(a=2)
    slots.reserve("c1", "r1", 2, there)
    there.plugins[slots.PLUGIN_NAME].remove_client(there, "c1")
    assert slots.reserve("c2", "r2", 2, there)["slots"] is not None


def test_slots_of_a_lost_worker_are_gone() -> None:
    there = scheduler(a=1, b=1)
    slots.reserve("c1", "r1", 2, there)
    there.workers.pop("tcp://a")
    there.plugins[slots.PLUGIN_NAME].remove_worker(there, "tcp://a")
    assert slots.reserve("c2", "r2", 1, there)["total"] == 1
    assert all(slot.worker == "tcp://b" for slot in there.plugins[slots.PLUGIN_NAME].holders)


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans()), max_size=30))
def test_no_order_of_requests_gives_a_slot_twice(requests: list[tuple[str, int, bool]]) -> None:
    there = scheduler(a=3, b=3, c=1)
    book = there.plugins[slots.PLUGIN_NAME]
    held: Counter[str] = Counter()
    for run, count, releases in requests:
        if releases:
            slots.release(run, there)
            held.pop(run, None)
            continue
        before = set(book.holders)
        answer = slots.reserve(f"client-{run}", run, count, there)
        if answer["slots"] is not None:
            got = {tuple(slot) for slot in answer["slots"]}
            assert len(got) == count
            assert not got & {(slot.worker, slot.host, slot.index, slot.gpu) for slot in before}
            held[run] += count
    assert len(book.holders) == sum(held.values()) <= 7
