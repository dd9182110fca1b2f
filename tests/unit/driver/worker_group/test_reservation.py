"""How long a run waits for slots, what it shows meanwhile, and what it says when they do not come."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from ddptrain.clusters.scheduler.slots import Refusal
from ddptrain.driver.worker_group import reservation
from ddptrain.driver.worker_group.reservation import SlotQueue, SlotRequest, WaitHooks
from ddptrain.errors import ClusterError

WISH = SlotRequest(4, False, start_timeout_s=20.0, wait_s=60.0)


class Clock:
    """The module's time, which passes only when it sleeps or is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reservation, "time", made)
    return made


def waiting(wish: SlotRequest = WISH, *, fault: str | None = None, cluster: str = "") -> tuple[SlotQueue, list[str]]:
    shown: list[str] = []
    return SlotQueue(wish, WaitHooks(None, lambda: fault, lambda: "Traceback", shown.append, cluster)), shown


def refusal(free: int, total: int) -> Refusal:
    return Refusal(4, free, total, holders=("r-9",), hosts={"h0": total}, place=1, of_any_kind=total)


def test_slots_that_others_hold_are_waited_for_as_long_as_wait_s(clock: Clock) -> None:
    queue, shown = waiting()
    assert queue.wait(refusal(1, 4)) == 4
    clock.now = 1059.9
    queue.wait(refusal(1, 4))
    assert shown == ["waiting for 4 slots, 1 of 4 are free: number 1 in line, held by r-9"]
    clock.now = 1060.0
    with pytest.raises(ClusterError, match=r"4 slots were asked for, 1 of 4 are free after 60 s, held by r-9"):
        queue.wait(refusal(1, 4))


def test_place_in_the_queue_and_holders_are_named_if_there_are_any(clock: Clock) -> None:
    queue, shown = waiting()
    queue.wait(refusal(1, 4))
    clock.now = 1030.0
    queue.wait(dataclasses.replace(refusal(1, 4), place=0))
    queue.wait(dataclasses.replace(refusal(1, 4), place=0, holders=()))
    assert shown == ["waiting for 4 slots, 1 of 4 are free, held by r-9", "waiting for 4 slots, 1 of 4 are free"]


def test_workers_are_waited_for_as_long_as_start_timeout_s(clock: Clock) -> None:
    queue, shown = waiting(cluster="big")
    clock.now = 1019.5
    queue.wait(refusal(2, 2))
    queue.wait(refusal(2, 2))
    assert shown == ["waiting for workers: 2 of 4 slots are there"]  # once
    clock.now = 1020.0
    with pytest.raises(ClusterError, match=r"2 came within 20 s \(2 on h0\).*cluster scale big 4\nTraceback"):
        queue.wait(refusal(2, 2))


def test_worker_that_will_never_appear_ends_the_wait_at_once() -> None:
    queue, _ = waiting(fault="the worker ended: exit code 1")
    with pytest.raises(ClusterError, match="the worker ended: exit code 1"):
        queue.wait(refusal(0, 0))


@pytest.mark.parametrize(("after_s", "free", "asked"), [(9.9, 3, 4), (10.0, 3, 3), (10.0, 1, 4), (10.0, 9, 4)])
def test_fewer_slots_are_enough_after_the_time_to_gather(clock: Clock, after_s: float, free: int, asked: int) -> None:
    queue, _ = waiting(replace(WISH, least=2, gather_s=10.0))
    clock.now += after_s
    assert queue.wait(refusal(free, 3)) == asked


def test_cluster_that_does_not_grow_is_not_waited_for() -> None:
    hooks = WaitHooks(None, lambda: None, lambda: "", lambda _: None, "dev", fixed=True)
    queue = SlotQueue(WISH, hooks)
    assert queue.wait(refusal(0, 0)) == 4  # its worker is still starting
    assert queue.wait(refusal(1, 4)) == 4  # another run holds them
    with pytest.raises(
        ClusterError, match=r"^4 slots were asked for, the cluster dev has 1 \(1 on h0\)\. .*scale dev 4$"
    ):
        queue.wait(refusal(1, 1))


def test_cluster_without_gpus_that_does_not_grow_is_not_waited_for() -> None:
    hooks = WaitHooks(None, lambda: None, lambda: "", lambda _: None, "dev", fixed=True)
    queue = SlotQueue(replace(WISH, gpus_only=True), hooks)
    assert queue.wait(refusal(0, 0)) == 4  # its worker is still starting
    with pytest.raises(
        ClusterError,
        match=r"^4 slots with a GPU were asked for, the cluster dev has none: there is no GPU in its 8 slots\. ",
    ):
        queue.wait(replace(refusal(0, 0), of_any_kind=8))


def test_offer_that_was_refused_is_not_asked_for_again_without_a_pause(clock: Clock) -> None:
    """As many slots as asked for are free, but others are before this run in the queue."""
    queue, _ = waiting(replace(WISH, least=2, gather_s=10.0))
    clock.now = 1010.0
    assert queue.wait(replace(refusal(3, 4), asked=4)) == 3
    assert clock.now == 1010.0  # there is something new to ask for
    queue.wait(replace(refusal(3, 4), asked=3))
    assert clock.now > 1010.0


def test_range_of_ranks_that_does_not_wait_ends_when_its_offer_is_refused(clock: Clock) -> None:
    queue, _ = waiting(replace(WISH, least=2, wait_s=0.0))
    assert queue.wait(replace(refusal(3, 4), asked=4)) == 3
    with pytest.raises(ClusterError, match=r"3 slots were asked for, 3 of 4 are free after 0 s.*others wait for them"):
        queue.wait(replace(refusal(3, 4), asked=3))


@pytest.mark.parametrize(("free", "asked_next"), [(1, 4), (2, 2), (3, 3)])
def test_after_the_time_to_gather_slots_the_least_number_suffices(clock: Clock, free: int, asked_next: int) -> None:
    queue, _ = waiting(replace(WISH, least=2, gather_s=10.0))
    clock.now = 1009.9
    assert queue.wait(refusal(free, 4)) == 4
    clock.now = 1010.0
    assert queue.wait(refusal(free, 4)) == asked_next
