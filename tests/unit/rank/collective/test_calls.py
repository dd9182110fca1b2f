"""A rank counts the calls that all ranks must make, and reports when it waits for others in one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddptrain.protocol import events
from ddptrain.rank.checkpoint.checkpoint_writer import state_key
from ddptrain.rank.checkpoint.coordination import WorkerGroupStore
from ddptrain.rank.checkpoint.snapshot import plain_bytes
from ddptrain.rank.collective import calls
from ddptrain.rank.collective.calls import CollectiveCalls
from ddptrain.rank.emitter import Emitter
from tests.conftest import PATIENCE_S
from tests.support import fake_time
from tests.unit.rank.stores import Gang
from tests.unit.rank.test_context import Rank
from tests.unit.specs import make_spec


class Told:
    """The calls of rank 0 of 2, and the events that it emits."""

    def __init__(self, folder: Path, worker_group: Gang) -> None:
        self.path = folder / "events"
        self.file = self.path.open("ab", buffering=0)
        self.calls = CollectiveCalls(worker_group.spec(0, 2), Emitter(self.file.fileno()))

    def events(self) -> list[events.Event]:
        return [events.decode(line) for line in self.path.read_bytes().splitlines()]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(calls, "FIRST_REPORT_S", 0.05)
    monkeypatch.setattr(calls, "_POLL_S", 0.01)
    made = Told(tmp_path, Gang())
    yield made
    made.file.close()


def test_wait_is_reported_after_a_while_and_again_after_twice_that_time(told: Told) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with told.calls.waiting("checkpoint", 40):
        while len(told.events()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    first, second = told.events()[:2]
    assert isinstance(first, events.Waiting) and isinstance(second, events.Waiting)
    assert (first.call, first.step) == (second.call, second.step) == ("checkpoint", 40)
    assert told.calls.wait is None


def test_wait_for_a_disk_is_not_reported(told: Told) -> None:
    with told.calls.waiting("checkpoint", 40, lambda: False):
        assert told.calls.wait is None
        time.sleep(0.3)
    assert told.events() == []


def test_calls_are_counted_by_name(told: Told) -> None:
    assert [told.calls.enter(name) for name in ("mean", "mean", "resume")] == [1, 2, 1]
    assert told.calls.counts == {"mean": 2, "resume": 1}


def test_ranks_wait_in_a_call_until_the_last_one_has_begun_it(tmp_path: Path) -> None:
    worker_group = Gang()
    met: list[int] = []

    def come(rank: int) -> None:
        spec = worker_group.spec(rank, 2)
        CollectiveCalls(spec, Emitter(-1)).meet("resume", 1, WorkerGroupStore(spec))
        met.append(rank)

    first = threading.Thread(target=come, args=(0,))
    first.start()
    store = WorkerGroupStore(worker_group.spec(1, 2))
    deadline = time.monotonic() + PATIENCE_S
    while not store.has("met/resume/1/0") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert met == []
    come(1)
    first.join(PATIENCE_S)
    assert sorted(met) == [0, 1]


def test_checkpoint_that_other_ranks_do_not_join_is_reported_as_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FIRST_REPORT_S", 0.05)
    monkeypatch.setattr(calls, "_POLL_S", 0.01)
    worker_group = Gang()
    rank = Rank(tmp_path, world_size=2, master_addr="127.0.0.1", master_port=worker_group.store.port, timeout_s=20.0)
    model = torch.nn.Linear(1, 1)
    rank.context.checkpoint(model=model, step=1)
    second = threading.Thread(target=lambda: rank.context.checkpoint(model=model, step=2))
    second.start()  # it waits for the other rank's part of the first checkpoint
    path, deadline = tmp_path / "events", time.monotonic() + PATIENCE_S

    def reported() -> list[str]:
        told = [events.decode(line) for line in path.read_bytes().splitlines()]
        return [event.call for event in told if isinstance(event, events.Waiting) and event.step == 2]

    while not reported() and time.monotonic() < deadline:  # on a busy machine the first call may be reported, too
        time.sleep(0.01)
    assert reported()[:1] == ["checkpoint"]
    own = plain_bytes({"random": None, "rank_state": None})
    for number in (1, 2):
        WorkerGroupStore(worker_group.spec(1, 2)).set(state_key(number, 1), own)
    second.join(PATIENCE_S)
    rank.context.close()
    rank.file.close()


# --- with a clock of the test ---


class Over(Exception):
    """The test has seen enough."""


@pytest.mark.parametrize(
    ("seconds", "reports"),
    [(2.0, [2.0]), (1.5, []), (200.0, [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 124.0, 184.0])],
)
def test_reports_of_a_wait_are_twice_as_far_apart_each_time_up_to_a_minute(
    monkeypatch: pytest.MonkeyPatch, seconds: float, reports: list[float]
) -> None:
    now = [100.0]
    told: list[Any] = []

    def sleep(interval_s: float) -> None:
        now[0] += interval_s
        if now[0] > 100.0 + seconds:
            raise Over

    def emit(event: events.Event) -> None:
        assert isinstance(event, events.Waiting) and (event.call, event.step) == ("checkpoint", 40)
        told.append(now[0] - 100.0)

    fake_time.replace(monkeypatch, "monotonic", lambda: now[0])
    fake_time.replace(monkeypatch, "sleep", sleep)
    made = CollectiveCalls(make_spec(world_size=1), SimpleNamespace(emit=emit))  # type: ignore[arg-type]
    with pytest.raises(Over), made.waiting("checkpoint", 40):
        made._watch()
    assert told == reports


def test_each_wait_is_reported_after_its_own_first_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    told: list[tuple[str, float]] = []
    waits = [calls.Wait("a", None, 100.0, lambda: True), None, calls.Wait("b", 1, 104.0, lambda: True)]

    def sleep(interval_s: float) -> None:
        now[0] += interval_s
        if now[0] >= 107.0:
            raise Over
        made.current = waits[0 if now[0] < 103.0 else 1 if now[0] < 104.0 else 2]

    def emit(event: Any) -> None:
        told.append((event.call, now[0]))

    fake_time.replace(monkeypatch, "monotonic", lambda: now[0])
    fake_time.replace(monkeypatch, "sleep", sleep)
    made = CollectiveCalls(make_spec(), SimpleNamespace(emit=emit))  # type: ignore[arg-type]
    with pytest.raises(Over):
        made._watch()
    assert told == [("a", 102.0), ("b", 106.0)]


@pytest.mark.parametrize(("world_size", "threads"), [(1, 0), (2, 1)])
def test_one_daemon_thread_watches_a_rank_that_has_others(
    monkeypatch: pytest.MonkeyPatch, world_size: int, threads: int
) -> None:
    started: list[Any] = []

    class Thread:
        def __init__(self, target: Any, name: str, daemon: bool) -> None:
            self.made = (target, name, daemon)

        def start(self) -> None:
            started.append(self.made)

    monkeypatch.setattr(calls.threading, "Thread", Thread)  # type: ignore[attr-defined]
    made = CollectiveCalls(make_spec(world_size=world_size), Emitter(-1))
    for _ in range(2):
        with made.waiting("mean"):
            pass
    assert started == [(made._watch, "ddptrain-calls", True)] * threads


def test_inner_wait_hides_the_outer_one() -> None:
    made = CollectiveCalls(make_spec(world_size=1), Emitter(-1))
    with made.waiting("outer", 3):
        with made.waiting("inner", for_others=lambda: False):
            inner, hidden = made.current, made.wait
        outer, shown = made.current, made.wait
    assert inner is not None and (inner.name, inner.step, hidden) == ("inner", None, None)
    assert outer is not None and (outer.name, outer.step) == ("outer", 3) and shown is outer
    assert made.current is None and made.wait is None


def test_single_rank_meets_nobody() -> None:
    store: Any = None
    CollectiveCalls(make_spec(world_size=1), Emitter(-1)).meet("resume", 1, store)
