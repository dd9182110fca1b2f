"""One inquiry after another: whom it asks, when it ends, and what it keeps for the next."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from ddptrain.driver.failure.fault import Fault, FaultKind
from ddptrain.driver.failure.hang import ANSWERS_S, StackCollector
from ddptrain.driver.failure.watchdog import Activity, Hang, Stage, Watchdog
from ddptrain.protocol import events
from tests.unit.driver.attempt.ranks import running

LOADING = ("/home/u/train.py:41 load_batch",)
HANG = Hang(Stage.TRAIN, (1,), 40.0, 41.0)
STARTED = events.Started(1, 7, "h")
RANKS = [running(rank, started=STARTED, entered=True) for rank in range(2)]
THREAD = events.ThreadFailure(5, "loader", "ValueError", "bad", "Traceback")


class _Signs:
    """A watchdog for which rank 1 works, and each rank is idle for ten times its number of seconds."""

    def idle_s(self, rank: Any, activity: Activity, now: float) -> float:
        return 10.0 * int(rank.spec.rank)

    def works(self, rank: Any, activity: Activity, now: float) -> bool:
        return bool(rank.spec.rank == 1)

    def uses(self, activity: Activity, now: float) -> str:
        return ""


def begun(before: StackCollector | None = None, hang: Hang | None = HANG, **more: Any) -> StackCollector:
    """An inquiry of two ranks that begins at 100 s."""
    collector = before if before is not None else StackCollector()
    return collector.begin(hang, RANKS, [Activity(), Activity()], cast(Watchdog, _Signs()), 100.0, **more)


def answered(collector: StackCollector, rank: int, main: tuple[str, ...] = LOADING, **more: Any) -> StackCollector:
    collector = collector.after(rank, events.Stacks(1, main, **more))
    return collector.after(rank, events.FileSaved(1, f"stacks/rank-{rank}.txt", "a", 1, ""))


def test_an_inquiry_is_under_way_from_its_beginning_until_it_is_closed() -> None:
    waiting = StackCollector(not_before=90.0)
    assert (waiting.begun, waiting.under_way) == (False, False)
    assert [waiting.may_begin(now) for now in (89.9, 90.0)] == [False, True]
    collector = begun()
    assert (collector.begun, collector.under_way, collector.may_begin(200.0)) == (True, True, False)
    assert (collector.until, collector.limit_s) == (100.0 + ANSWERS_S, 40.0)
    _, fault = collector.result(RANKS, 104.9, 8)
    assert fault is None
    closed, fault = begun(hang=None).result(RANKS, 105.0, 8)
    assert fault is not None and (closed.begun, closed.under_way) == (True, False)
    assert closed.result(RANKS, 200.0, 9) == (closed, None)


def test_the_answer_of_a_rank_replaces_that_of_its_worker_and_not_the_other_way() -> None:
    of_worker, of_rank = events.Stacks(1, ("w",), state="busy"), events.Stacks(2, ("r",))
    collector = StackCollector().after(0, of_worker)
    assert collector.stacks == {0: of_worker}
    assert collector.after(0, of_rank).stacks == collector.after(0, of_rank).after(0, of_worker).stacks == {0: of_rank}
    assert collector.after(1, of_worker).stacks == {0: of_worker, 1: of_worker}
    assert collector.after(1, events.Entered(3)) is collector


def test_the_first_thread_that_has_failed_explains_a_later_fault_of_its_rank() -> None:
    collector = StackCollector().after(1, THREAD)
    assert collector.after(1, events.ThreadFailure(6, "other", "KeyError", "", "")) is collector
    fault = Fault(1, FaultKind.EXCEPTION, 9, "it broke")
    assert collector.explained(fault).message == "it broke (its thread loader had ended with ValueError: bad)"
    assert collector.explained(Fault(0, FaultKind.EXCEPTION, 9, "it broke")).message == "it broke"


def test_an_inquiry_ends_once_every_rank_that_lives_has_answered() -> None:
    collector = answered(begun(hang=None), 0)
    assert collector.answered == {0}
    assert collector.result(RANKS, 101.0, 8) == (collector, None)
    _, fault = answered(collector, 1).result(RANKS, 101.0, 8)
    assert fault is not None and (fault.kind, fault.time_ns) == (FaultKind.HANG, 8)
    _, fault = collector.result([RANKS[0], dataclasses.replace(RANKS[1], lost=True)], 101.0, 8)
    assert fault is not None and fault.rank == 0


def test_the_fault_says_what_was_known_of_the_rank_when_the_ranks_were_asked() -> None:
    collector = answered(answered(begun(), 0, ("/u/train.py:1 other",)), 1).after(0, THREAD)
    none, fault = collector.result(RANKS, 101.0, 8)
    assert fault is None and not none.begun, "rank 1 has been idle for longer, and works"
    late = answered(answered(begun(), 0), 1)
    late = late.after(0, THREAD)
    _, fault = late.result([RANKS[0], dataclasses.replace(RANKS[1], lost=True)], 105.0, 8)
    assert fault is not None and fault.traceback == "Traceback"
    assert fault.message == (
        "no progress for 40 s, it is in train.py:41 in load_batch; its thread loader has ended with ValueError: bad "
        "(stacks: artifacts/stacks/)"
    )


def test_an_inquiry_that_finds_the_ranks_at_work_keeps_their_stacks_for_the_next() -> None:
    earlier = {1: events.Stacks(1, ("earlier",))}
    first = StackCollector(not_before=7.0, before=earlier, threads={1: THREAD})
    collector = answered(answered(begun(first, HANG), 0), 1)
    after, fault = collector.result(RANKS, 101.0, 8)
    assert fault is None
    assert after == StackCollector(not_before=101.0 + 20.0, before=collector.stacks, threads={1: THREAD})


def test_a_rank_that_finishes_during_the_inquiry_ends_it_without_a_fault_unless_a_wait_has_timed_out() -> None:
    collector = answered(begun(hang=None), 0)
    finished = [RANKS[0], dataclasses.replace(RANKS[1], finished=True)]
    after, fault = collector.result(finished, 105.0, 8)
    assert fault is None and after == StackCollector(not_before=105.0, before=collector.stacks)
    victim = Fault(0, FaultKind.EXCEPTION, 3, "timed out", victim=True, timed_out=True)
    _, fault = collector.result([dataclasses.replace(finished[0], fault=victim, lost=True), finished[1]], 105.0, 8)
    assert fault is not None and fault.rank == 1


def test_of_ranks_that_were_not_asked_nothing_is_known() -> None:
    collector = StackCollector(until=100.0, limit_s=40.0)
    _, fault = collector.result([RANKS[0]], 100.0, 8)
    assert fault is not None
    assert fault.message == "no progress for 40 s, its place in the code is not known (stacks: artifacts/stacks/)"
