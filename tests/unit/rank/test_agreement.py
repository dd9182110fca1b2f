"""When ranks save and when they end: agreed on through a real store, without a collective."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.rank.agreement import Agreement, Patience
from tests.unit.rank.ranks import Gang
from tests.unit.specs import make_spec


@pytest.fixture
def worker_group() -> Gang:
    return Gang()


def alone(**changes: Any) -> Agreement:
    return Agreement(make_spec(**{"world_size": 1, "every_epochs": None, **changes}))


def due(rank: Agreement, *calls: tuple[int, float | None]) -> list[bool]:
    return [rank.call(step, epoch, last=False)[0] for step, epoch in calls]


@pytest.mark.parametrize(
    ("settings", "calls", "expected"),
    [
        ({"every_epochs": 1}, [(1, None), (2, 0.5), (3, 1.0)], [True, False, True]),
        (
            {"every_epochs": 2},
            [(1, 0.5), (1, 1), (1, 1.5), (1, 2), (1, 2.0), (1, 3), (1, 4.0)],
            [*(False, False, False, True), *(True, False, True)],
        ),
        ({}, [(1, 1.0), (2, None)], [False, True]),
        (
            {"every_steps": 10},
            [(3, None), (9, None), (12, None), (19, None), (20, None), (45, None), (46, None)],
            [*(False, False, True), *(False, True, True, False)],
        ),
        ({"every_steps": 10}, [(10, 0.5), (11, 1.0)], [True, False]),
        ({"every_steps": 10, "every_epochs": 1}, [(5, 1.0), (12, 1.5)], [True, True]),
        ({"every_steps": 3}, [(1, None), (2, None)], [False, False]),
        ({"every_s": 100.0}, [(1, None), (2, None)], [False, False]),
    ],
)
def test_call_saves_by_epoch_or_step_and_if_nothing_applies(
    settings: dict[str, Any], calls: list[Any], expected: list[bool]
) -> None:
    assert due(alone(**settings), *calls) == expected


def test_seconds_are_counted_by_rank_0_and_all_ranks_save_in_the_same_calls(worker_group: Gang) -> None:
    def train(number: int) -> tuple[list[int], float]:
        rank, saved = Agreement(worker_group.spec(number, 3, every_epochs=None, every_s=0.1)), list[int]()
        began = time.monotonic()
        for call in range(1, 201):
            time.sleep(0.002 if call < 100 or number else 0.004)  # no rank's clock is another's
            if rank.call(call, None, last=False)[0]:
                saved.append(call)
                rank.saved()
        return saved, time.monotonic() - began

    with ThreadPoolExecutor(3) as pool:
        (calls, took_s), *others = pool.map(train, range(3))
    assert [saved for saved, _ in others] == [calls, calls]
    assert 3 <= len(calls) <= took_s / 0.1


# --- the last call ---


@pytest.mark.parametrize(("read", "last", "early"), [(True, False, True), (True, True, False), (False, False, False)])
def test_workload_that_has_read_the_notice_ends_early_unless_it_is_complete(
    read: bool, last: bool, early: bool
) -> None:
    rank = alone()
    rank.call(1, None, last=last)
    rank.read_preempted = read
    assert rank.ends_early is early


def test_ranks_end_with_the_same_call_wherever_they_were_when_they_were_asked(worker_group: Gang) -> None:
    """Rank 0 is ahead, rank 1 is asked late and continues meanwhile: no rank has passed the call that they agree on."""
    ranks = [Agreement(worker_group.spec(number, 3, grace_s=60.0)) for number in range(3)]
    for rank, entered in zip(ranks, (5, 2, 3), strict=True):
        for step in range(entered):
            assert not rank.call(step, 0.5, last=False)[1]
    ranks[0].end()
    ranks[2].end()

    def end(number: int) -> int:
        for call in range((5, 2, 3)[number] + 1, 100):
            if ranks[number].call(call, 0.5, last=False)[1]:
                return call
            if call == 20:
                ranks[number].end()  # rank 1, late
        return 0

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(end, range(3))) == [21] * 3


def test_a_rank_that_is_not_asked_holds_the_others_up_only_for_the_grace_period(worker_group: Gang) -> None:
    rank = Agreement(worker_group.spec(0, 2, grace_s=0.3))
    rank.end()
    began = time.monotonic()
    assert not rank.call(1, 0.5, last=False)[1]
    assert 0.25 < time.monotonic() - began < 45  # dist_timeout_s is 60
    assert not rank.call(2, 0.5, last=False)[1]


# --- what rank 0 saves for the others ---


def test_rank_0_gets_the_states_of_ranks_that_give_one_and_waits_for_no_others(worker_group: Gang) -> None:
    ranks = [Agreement(worker_group.spec(number, 3)) for number in range(3)]
    ranks[1].give_state(1, b"\x00one")
    for rank in ranks[1:]:
        rank.give_no_more()
    assert ranks[0].states(1, threading.Event()) == [b"\x00one", None]
    assert ranks[0].states(1, threading.Event()) == [None, None]  # the store would keep every state of the run


def test_late_rank_is_not_waited_for_while_the_worker_group_is_being_stopped(worker_group: Gang) -> None:
    hurry = threading.Event()
    hurry.set()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        Agreement(worker_group.spec(0, 2)).states(1, hurry)
    assert time.monotonic() - began < 10  # the time limit is 20 s


def test_keys_of_another_attempt_are_not_seen(worker_group: Gang) -> None:
    Agreement(worker_group.spec(1, 2, attempt=1)).give_state(1, b"of attempt 1")
    second = Agreement(worker_group.spec(0, 2, attempt=2, timeout_s=0.2))
    assert second.states(1, threading.Event()) == [None]


def test_rank_that_does_not_call_a_method_is_named(worker_group: Gang) -> None:
    with pytest.raises(RuntimeError, match=r"ctx.resume: not called by rank 1 within 1 s; all ranks must call it"):
        Agreement(worker_group.spec(0, 2, timeout_s=1.0)).meet("resume")


# --- stop_early ---


def patience(*, mode: str = "min", min_delta: float = 0.0, after: int = 2) -> Patience:
    settings: Any = SimpleNamespace(metric="score", mode=mode, min_delta=min_delta, patience=after)
    return Patience(settings)


@pytest.mark.parametrize(
    ("settings", "values", "ends_at"),
    [
        ({}, [3.0, 2.0, 2.0, 2.0, 1.0], 4),
        ({}, [3.0, 2.0, 2.5, 1.0, 1.5, 1.0], 6),
        ({"mode": "max"}, [1.0, 2.0, 1.0, 3.0, 3.0, 2.0], 6),
        ({"min_delta": 0.5}, [3.0, 2.6, 2.4, 2.0, 1.9, 1.8], 5),
        ({}, [math.nan, math.nan, 1.0], 2),
        ({"after": 9}, [1.0] * 9, None),
    ],
)
def test_patience_counts_values_that_are_no_improvement(
    settings: dict[str, Any], values: list[float], ends_at: int | None
) -> None:
    counted = patience(**settings)
    ended = None
    for number, value in enumerate(values, start=1):
        counted.add("log", {"score": value, "other": 0.0}, number, None)
        ended = ended or (number if counted.is_over else None)
    assert ended == ends_at


def test_value_that_is_logged_and_given_to_a_checkpoint_counts_once() -> None:
    logged_first, saved_first = patience(after=3), patience(after=3)
    for step in range(3):
        for counted, sources in ((logged_first, ("log", "checkpoint")), (saved_first, ("checkpoint", "log"))):
            for source in sources:
                counted.add(source, {"score": 1.0}, step, None)
    assert (logged_first.waited, saved_first.waited) == (2, 2)


def test_patience_goes_on_from_a_checkpoint_of_the_same_metric() -> None:
    before, after, other = patience(), patience(), patience()
    for value in (2.0, 3.0):
        before.add("log", {"score": value}, 7, 1.0)
    after.restore(before.state())
    other.restore({**before.state(), "metric": "another"})
    assert (after.best, after.step, after.waited) == (2.0, 7, 1)
    assert other.best is None
    after.add("log", {"score": 2.5}, 8, 2.0)
    assert after.is_over
