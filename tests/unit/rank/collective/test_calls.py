"""A rank counts the calls that all ranks must make, and reports when it waits for others in one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

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
from tests.unit.rank.stores import Gang
from tests.unit.rank.test_context import Rank


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
    while b'"waiting"' not in path.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting = next(events.decode(line) for line in path.read_bytes().splitlines() if b'"waiting"' in line)
    assert isinstance(waiting, events.Waiting) and (waiting.call, waiting.step) == ("checkpoint", 2)
    own = plain_bytes({"random": None, "rank_state": None})
    for number in (1, 2):
        WorkerGroupStore(worker_group.spec(1, 2)).set(state_key(number, 1), own)
    second.join(PATIENCE_S)
    rank.context.close()
    rank.file.close()
