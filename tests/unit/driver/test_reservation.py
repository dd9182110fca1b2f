"""How long a run waits for slots, what it shows meanwhile, and what it says when they do not come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddptrain.clusters import lifecycle
from ddptrain.clusters.scheduler.slots import Refusal
from ddptrain.config.run_config import RunConfig
from ddptrain.driver import reservation
from ddptrain.driver.reservation import SlotQueue, SlotRequest, WaitHooks, request_for
from ddptrain.errors import ClusterError
from tests.support.fake_time import Clock

SINCE = 3660.0
WISH = SlotRequest(4, False, start_timeout_s=20.0, wait_s=60.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(1000.0)
    monkeypatch.setattr(reservation, "time", made)
    return made


def waiting(wish: SlotRequest = WISH, *, fault: str | None = None, cluster: str = "") -> tuple[SlotQueue, list[str]]:
    shown: list[str] = []
    return SlotQueue(
        wish, WaitHooks(shown.append, worker_fault=lambda: fault, last_words=lambda: "Traceback", cluster=cluster)
    ), shown


def refusal(free: int, total: int) -> Refusal:
    return Refusal(4, free, total, holders=(("r-9", 3, SINCE),), hosts={"h0": total}, place=1, of_any_kind=total)


def test_slots_that_others_hold_are_waited_for_as_long_as_wait_s(clock: Clock) -> None:
    queue, shown = waiting()
    assert queue.wait(refusal(1, 4)) == 4
    clock.now = 1059.9
    queue.wait(refusal(1, 4))
    assert shown == [
        "waiting for 4 slots, 1 of 4 are free: number 1 in line, held by r-9 (3 slots since 01 Jan 01:01 UTC)"
    ]
    clock.now = 1060.0
    with pytest.raises(ClusterError, match=r"4 slots are needed, but 1 of 4 are free after 60 s, held by r-9"):
        queue.wait(refusal(1, 4))


def test_workers_are_waited_for_as_long_as_start_timeout_s(clock: Clock) -> None:
    queue, shown = waiting(cluster="big")
    clock.now = 1019.5
    queue.wait(refusal(2, 2))
    queue.wait(refusal(2, 2))
    assert shown == ["waiting for workers: 2 of 4 slots are there"]  # once
    clock.now = 1020.0
    with pytest.raises(ClusterError, match=r"only 2 joined within 20 s \(2 on h0\).*--name big --ranks 4\nTraceback"):
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
    hooks = WaitHooks(lambda _: None, cluster="dev", fixed=True)
    queue = SlotQueue(WISH, hooks)
    assert queue.wait(refusal(0, 0)) == 4  # its worker is still starting
    assert queue.wait(refusal(1, 4)) == 4  # another run holds them
    with pytest.raises(
        ClusterError,
        match=r"^4 slots are needed, but the cluster dev has only 1 \(1 on h0\)\. .*--name dev --ranks 4$",
    ):
        queue.wait(refusal(1, 1))


@pytest.mark.parametrize(("ranks", "shown"), [(4, "4"), (None, "N")])
def test_cluster_whose_only_worker_has_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, ranks: int | None, shown: str
) -> None:
    """Until a command may have started the worker again, which nothing else does."""
    ended: list[str | None] = [None, "the worker (pid 7) has ended"]
    monkeypatch.setattr(lifecycle, "ended_process", lambda name: {"dev": ended.pop(0)}[name])
    hooks = WaitHooks(lambda _: None, last_words=lambda: "last lines", cluster="dev", fixed=True)
    queue = SlotQueue(replace(WISH, ranks=ranks), hooks)
    assert queue.wait(refusal(1, 4)) == ranks
    assert queue.wait(refusal(0, 0)) == ranks  # a command is at work, or the worker has not joined yet
    with pytest.raises(
        ClusterError,
        match=r"^4 slots are needed, but the worker \(pid 7\) has ended, and with it the cluster dev has none; start "
        rf"it again: ddptrain cluster down dev, then ddptrain cluster up --name dev --ranks {shown}\nlast lines$",
    ):
        queue.wait(refusal(0, 0))


def test_cluster_without_gpus_that_does_not_grow_is_not_waited_for() -> None:
    hooks = WaitHooks(lambda _: None, cluster="dev", fixed=True)
    queue = SlotQueue(replace(WISH, gpus_only=True), hooks)
    assert queue.wait(refusal(0, 0)) == 4  # its worker is still starting
    with pytest.raises(
        ClusterError,
        match=r"^4 slots with a GPU are needed, but the cluster dev has none: there is no GPU in its 8 slots\. ",
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
    with pytest.raises(ClusterError, match=r"3 slots are needed, but 3 of 4 are free after 0 s.*others wait for them"):
        queue.wait(replace(refusal(3, 4), asked=3))


@pytest.mark.parametrize(
    ("cluster", "of_machine", "expected"),
    [
        ({}, 3, SlotRequest(3, False, 20.0, 60.0)),
        ({"gpus": 2}, 2, SlotRequest(2, False, 20.0, 60.0)),  # this machine has shared its GPUs out already
        ({}, None, SlotRequest(None, False, 20.0, 60.0)),
        ({"ranks": 3}, None, SlotRequest(3, False, 20.0, 60.0)),
        ({"gpus": 2}, None, SlotRequest(2, True, 20.0, 60.0)),
        ({"gpus": 1}, None, SlotRequest(1, True, 20.0, 60.0)),
        ({"gpus": 0}, None, SlotRequest(None, False, 20.0, 60.0)),
        ({"ranks": 3, "gpus": 4}, None, SlotRequest(3, True, 20.0, 60.0)),
        ({"ranks": {"min": 2, "max": 4}}, None, SlotRequest(4, False, 20.0, 60.0, 0, 2, 7.0)),
    ],
)
def test_slots_are_requested_as_the_configuration_says(
    cluster: dict[str, Any], of_machine: int | None, expected: SlotRequest
) -> None:
    config = RunConfig.model_validate(
        {
            "workload": "petnames",
            "cluster": {"start_timeout_s": 20.0, "wait_s": 60.0, **cluster},
            "failure": {"lost_after_s": 14.0, "max_restarts": 1},
        }
    )
    assert request_for(config, of_machine) == expected


def test_time_to_gather_slots_is_waited_for_even_if_that_is_longer_than_the_other_limits(clock: Clock) -> None:
    queue, _ = waiting(replace(WISH, least=2, wait_s=5.0, start_timeout_s=5.0, gather_s=10.0))
    clock.now = 1009.9
    assert queue.wait(refusal(1, 1)) == 4
    clock.now = 1010.0
    with pytest.raises(ClusterError, match=r"^4 slots are needed, but only 1 joined within 10 s"):
        queue.wait(refusal(1, 1))


@pytest.mark.parametrize(
    ("wish", "refused", "cluster", "text"),
    [
        (
            replace(WISH, gpus_only=True, start_timeout_s=0.0),
            Refusal(1, 0, 0, 0, (), {}, 3),
            "",
            (
                "1 slot with a GPU is needed, but none joined within 0 s. "
                "Use a cluster with GPUs, or train on the CPU with cluster.gpus: 0"
            ),
        ),
        (
            replace(WISH, wait_s=0.0),
            Refusal(2, 2, 4, 0, (("r-8", 1, SINCE), ("r-9", 1, SINCE)), {}, 4),
            "",
            (
                "2 slots are needed, but 2 of 4 are free after 0 s, held by r-8 (1 slot since 01 Jan 01:01 UTC), "
                "r-9 (1 slot since 01 Jan 01:01 UTC), and others wait for them. "
                "Wait in line with --wait (cluster.wait_s), or ask for fewer with --ranks"
            ),
        ),
    ],
)
def test_error_says_what_is_missing_and_what_to_do(
    wish: SlotRequest, refused: Refusal, cluster: str, text: str
) -> None:
    queue, _ = waiting(wish, cluster=cluster)
    with pytest.raises(ClusterError) as raised:
        queue.wait(refused)
    assert str(raised.value) == text
