"""When calls of ctx.checkpoint save, and which call is the last one, on one rank with a store in memory."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.rank import agreement
from ddptrain.rank.agreement import CheckpointCalls, PreemptedExit, SaveInterval, SaveSchedule
from tests.support.fake_time import Clock
from tests.unit.specs import make_spec


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
