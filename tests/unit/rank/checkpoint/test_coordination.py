"""When ranks save and when they end: agreed on without a collective."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddptrain.rank.agreement import CheckpointCalls, SaveSchedule, WorkerGroupStore
from tests.support.pace import is_cheap
from tests.unit.rank.stores import Gang
from tests.unit.specs import make_spec


@pytest.fixture
def worker_group() -> Gang:
    return Gang()


def due(**changes: Any) -> SaveSchedule:
    spec = make_spec(**{"world_size": 1, "every_epochs": None, **changes})
    return SaveSchedule(spec, WorkerGroupStore(spec))


def due_at(rule: SaveSchedule, steps: list[int], epochs: list[float | None]) -> list[bool]:
    return [rule.now(n, step, epoch) for n, (step, epoch) in enumerate(zip(steps, epochs, strict=True), start=1)]


def test_a_multiple_of_every_steps_that_was_stepped_over_counts() -> None:
    assert due_at(due(every_steps=10), [3, 9, 12, 19, 20, 45, 46], [None] * 7) == [
        *(False, False, True),
        *(False, True, True, False),
    ]


def test_steps_before_the_resume_do_not_count() -> None:
    rule = due(every_steps=10)
    rule.step = 12
    assert due_at(rule, [13, 19, 20], [None] * 3) == [False, False, True]


def test_only_whole_epochs_count_and_only_every_so_many() -> None:
    epochs: list[float | None] = [0.5, 1, 1.5, 2, 2.0, 3, 4.0]
    assert due_at(due(every_epochs=2), [1] * 7, epochs) == [False, False, False, True, True, False, True]
    assert not any(due_at(due(), [1] * 7, epochs))


def test_every_call_saves_where_nothing_else_could_tell() -> None:
    assert due_at(due(every_epochs=3), [1, 2], [None] * 2) == [True, True]
    assert due_at(due(every_steps=3), [1, 2], [None] * 2) == [False, False]
    assert due_at(due(every_s=100.0), [1, 2], [None] * 2) == [False, False]


def test_seconds_are_counted_by_rank_0_and_all_ranks_save_in_the_same_calls(worker_group: Gang) -> None:
    def train(rank: int) -> tuple[list[int], float]:
        spec = worker_group.spec(rank, 3, every_epochs=None, every_s=0.1)
        began = time.monotonic()
        rule, saved = SaveSchedule(spec, WorkerGroupStore(spec)), list[int]()
        for call in range(1, 201):
            time.sleep(0.002 if call < 100 or rank else 0.004)  # no rank's clock is another's
            if rule.now(call, call, None):
                saved.append(call)
                rule.saved()
        return saved, time.monotonic() - began

    with ThreadPoolExecutor(3) as pool:
        (calls, took_s), *others = pool.map(train, range(3))
    assert [saved for saved, _ in others] == [calls, calls]
    assert 3 <= len(calls) <= took_s / 0.1


def test_calls_that_are_not_due_cost_next_to_nothing() -> None:
    rule = due(every_s=3600.0, every_steps=10**9)
    assert is_cheap(lambda call: rule.now(call + 1, call + 1, 0.5), 10e-6)


def test_ranks_end_with_the_same_call_wherever_they_were_when_they_were_told(worker_group: Gang) -> None:
    """Rank 0 is ahead, rank 1 is told late and goes on meanwhile: nobody has passed the call that they agree on."""
    specs = [worker_group.spec(rank, 3, grace_s=60.0) for rank in range(3)]
    calls = [CheckpointCalls(spec, WorkerGroupStore(spec)) for spec in specs]
    entered = (5, 2, 3)
    for counter, times in zip(calls, entered, strict=True):
        for _ in range(times):
            assert not counter.is_last(counter.enter())
    calls[0].tell_to_end()
    calls[2].tell_to_end()

    def end(counter: CheckpointCalls) -> int:
        while not counter.is_last(number := counter.enter()):
            if number == 20:
                counter.tell_to_end()  # rank 1, late
        return number

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(end, calls))
    assert ends == [21] * 3


def test_a_rank_that_hears_nothing_keeps_the_others_only_for_the_grace(worker_group: Gang) -> None:
    spec = worker_group.spec(0, 2, grace_s=0.3)
    calls = CheckpointCalls(spec, WorkerGroupStore(spec))
    calls.tell_to_end()
    began = time.monotonic()
    assert not calls.is_last(calls.enter())
    assert 0.25 < time.monotonic() - began < 45  # dist_timeout_s is 60
    assert not calls.is_last(calls.enter())


def test_keys_of_another_attempt_are_not_seen(worker_group: Gang) -> None:
    first = worker_group.spec(0, 2)
    WorkerGroupStore(first).set("a", "1")
    assert WorkerGroupStore(first).get("a") == b"1"
    assert not WorkerGroupStore(dataclasses.replace(first, attempt=2)).has("a")
