"""When ranks save, and how they agree on it."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddptrain.rank import agreement
from ddptrain.rank.agreement import CheckpointCalls, PreemptedExit, SaveInterval, SaveSchedule, WorkerGroupStore
from tests.support.fake_time import Clock
from tests.support.pace import is_cheap
from tests.unit.rank.stores import Gang
from tests.unit.specs import make_spec

# --- When calls of ctx.checkpoint save, and which call is the last one, on one rank with a store in memory ---


class Store:
    """The store of the worker group; `broken` is raised by every call."""

    def __init__(self, **values: str) -> None:
        self.values = {key.replace("_", "/"): value.encode() for key, value in values.items()}
        self.broken: Exception | None = None

    def set(self, key: str, value: str) -> None:
        self._check()
        self.values[key] = value.encode()

    def has(self, key: str) -> bool:
        self._check()
        return key in self.values

    def get(self, key: str) -> bytes:
        self._check()
        return self.values[key]

    def _check(self) -> None:
        if self.broken:
            raise self.broken


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(agreement, "time", made)
    return made


def interval(store: Store, rank: int = 0, world_size: int = 2) -> SaveInterval:
    return SaveInterval(make_spec(rank=rank, world_size=world_size), store, 60.0)  # type: ignore[arg-type]


def test_rank_0_looks_at_the_clock_after_half_of_the_calls_that_fit(clock: Clock) -> None:
    store = Store()
    pace = interval(store)
    looked: list[tuple[int, str]] = []
    for call in range(1, 200):
        clock.now += 1.0  # a call takes a second
        if pace.due(call):
            looked.append((call, "saves"))
            pace.restart()
        elif f"pace/{call}" in store.values:
            looked.append((call, "looks"))
    # After 1 s, 2 s, 4 s ...: twice the calls before, and then half of what is left of the 60 s.
    calls = [1, 2, 4, 8, 16, 32, 46, 53, 56, 58, 59]
    expected = [(call, "looks") for call in calls] + [(60, "saves")]
    assert looked[:12] == expected
    assert store.values["pace/1"] == b"0 2" and store.values["pace/60"] == b"1 90"
    assert [call for call, what in looked if what == "saves"] == [60, 120, 180]


def test_other_ranks_follow_rank_0(clock: Clock) -> None:
    store = Store(pace_1="0 5", pace_5="1 6")
    pace = interval(store, rank=1)
    assert [pace.due(call) for call in range(1, 6)] == [False, False, False, False, True]
    with pytest.raises(KeyError):
        pace.due(6)


def test_single_rank_tells_nobody(clock: Clock) -> None:
    store = Store()
    pace = interval(store, world_size=1)
    clock.now = 159.9
    assert not pace.due(1)
    clock.now = 160.0
    assert pace.due(2) and store.values == {}


@pytest.mark.parametrize(
    ("settings", "calls", "expected"),
    [
        ({}, [(1, None), (2, 0.5), (3, 1.0)], [True, False, True]),
        ({"every_epochs": 2}, [(1, 1.0), (2, 2.0), (3, 2.5), (4, 4.0)], [False, True, False, True]),
        ({"every_epochs": None}, [(1, 1.0), (2, None)], [False, True]),
        (
            {"every_steps": 10},
            [(9, None), (10, None), (19, None), (31, None), (31, None)],
            [False, True, False, True, False],
        ),
        ({"every_steps": 10, "every_epochs": None}, [(10, 0.5), (11, 1.0)], [True, False]),
        ({"every_steps": 10}, [(5, 1.0), (12, 1.5)], [True, True]),
    ],
)
def test_call_saves_by_epoch_or_step(settings: dict[str, Any], calls: list[Any], expected: list[bool]) -> None:
    schedule = SaveSchedule(make_spec(**settings), Store())  # type: ignore[arg-type]
    assert [schedule.now(number, *call) for number, call in enumerate(calls, 1)] == expected
    schedule.saved()
    assert schedule.step == calls[-1][0]


# --- the last call ---


def calls_of(store: Store, rank: int = 0, world_size: int = 2, **more: Any) -> CheckpointCalls:
    return CheckpointCalls(make_spec(rank=rank, world_size=world_size, grace_s=2.0, **more), store)  # type: ignore[arg-type]


def test_calls_are_counted_from_1_and_say_that_the_workload_saves() -> None:
    calls = calls_of(Store())
    assert [calls.saves, calls.enter(), calls.enter(), calls.saves] == [False, 1, 2, True]
    assert not calls.is_last(9) and (calls.notified, calls.read_preempted, calls.complete) == (False, False, False)
    assert not calls.has_saved and calls_of(Store(), resume_from="c").has_saved


@pytest.mark.parametrize(
    ("seen", "complete", "ends"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_workload_that_has_read_the_notice_ends_early_unless_it_is_complete(
    seen: bool, complete: bool, ends: bool
) -> None:
    calls = calls_of(Store())
    calls.read_preempted, calls.complete = seen, complete
    assert calls.ends_early is ends


def test_single_rank_ends_with_its_next_call() -> None:
    store = Store()
    calls = calls_of(store, world_size=1)
    calls.enter()
    calls.tell_to_end()
    calls.enter()
    calls.tell_to_end()
    assert [calls.is_last(number) for number in (1, 2, 3)] == [False, True, True] and store.values == {}


def test_exit_code_of_a_preemption() -> None:
    assert PreemptedExit().code == 75


# --- When ranks save and when they end: agreed on without a collective ---


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
