"""What rank 0 does about the states of other ranks: gathered, late, missing, or in a hurry."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.protocol import events
from ddptrain.rank.checkpoint import checkpoint_writer, file_format, snapshot
from ddptrain.rank.checkpoint.checkpoint_writer import CheckpointWriter, PendingCheckpoint, done_key, state_key
from ddptrain.rank.checkpoint.coordination import WorkerGroupStore
from ddptrain.rank.checkpoint.snapshot import Snapshot, plain_bytes
from ddptrain.rank.emitter import Emitter
from tests.unit.rank.stores import Gang
from tests.unit.specs import make_spec


class Group:
    """Rank 0 of two, and the store through which rank 1 leaves its state."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        worker_group = Gang()
        self.worker_group, self.folder = worker_group, folder
        self.file = (folder / "events").open("ab", buffering=0)
        spec = worker_group.spec(0, 2, staging=str(folder), **changes)
        self.store, self.other = WorkerGroupStore(spec), WorkerGroupStore(worker_group.spec(1, 2))
        self.saver = CheckpointWriter(spec, Emitter(self.file.fileno()), self.store)

    def start(self, number: int) -> None:
        folder = self.folder / f"checkpoint-{number}"
        own = plain_bytes({"rank": 0})
        self.saver.start(
            PendingCheckpoint(number, 10 * number, None, folder, Snapshot({}, {}, {"step": 10 * number}), own)
        )

    def states(self, number: int) -> Any:
        """The states of all ranks in a checkpoint."""
        return file_format.read_state(self.folder / f"checkpoint-{number}")["ranks"]

    def events(self) -> list[events.Event]:
        told = [events.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]
        return [event for event in told if not isinstance(event, events.Timed)]  # they depend on the machine's speed


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    made.file.close()


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Group]:
    """A group whose ranks wait for each other for 0.2 s."""
    made = Group(tmp_path, timeout_s=0.2)
    yield made
    made.file.close()


def test_state_of_each_rank_is_in_the_checkpoint_and_its_key_is_deleted(group: Group) -> None:
    for number in (1, 2):
        group.other.set(state_key(number, 1), plain_bytes({"rank": 1, "number": number}))
        group.start(number)
        assert group.saver.wait(60)
        assert group.states(number) == [{"rank": 0}, {"rank": 1, "number": number}]
        assert not group.store.has(state_key(number, 1)), "the store would keep every state of the run"
    assert [type(event) for event in group.events()] == [events.CheckpointSaved, events.CheckpointSaved]


def test_late_rank_does_not_drop_the_checkpoint_and_is_named_once(impatient: Group) -> None:
    for number in (1, 2):
        impatient.start(number)
        assert impatient.saver.wait(60)
        assert impatient.states(number) == [{"rank": 0}, None]
    note, first, second = impatient.events()
    assert isinstance(note, events.Note) and note.level == "warning"
    assert note.message.startswith("rank 1 did not call ctx.checkpoint for step 10: its random state is not saved")
    assert isinstance(first, events.CheckpointSaved) and isinstance(second, events.CheckpointSaved)
    assert (first.step, second.step) == (10, 20)


def test_rank_that_is_done_is_not_waited_for_but_its_last_state_counts(group: Group) -> None:
    group.other.set(state_key(1, 1), plain_bytes({"rank": "last"}))
    group.other.set(done_key(1), "")
    for number in (1, 2):
        began = time.monotonic()
        group.start(number)
        assert group.saver.wait(60)
        assert time.monotonic() - began < 10, "the time limit of the group is 20 s"
    assert (group.states(1), group.states(2)) == ([{"rank": 0}, {"rank": "last"}], [{"rank": 0}, None])


def test_hurry_drops_what_can_not_be_complete_and_keeps_what_can(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group.start(1)
    assert group.saver.wait(60, hurry=True)
    assert not (group.folder / "checkpoint-1").exists() and group.events() == []
    monkeypatch.setattr(checkpoint_writer, "_LATE_S", 60.0)
    group.start(2)
    timer = threading.Timer(0.1, lambda: group.other.set(state_key(2, 1), plain_bytes({"rank": 1})))
    timer.start()
    assert group.saver.wait(60, hurry=True)
    timer.join()
    assert group.states(2) == [{"rank": 0}, {"rank": 1}]
    assert [type(event) for event in group.events()] == [events.CheckpointSaved]


def test_wait_reports_that_a_checkpoint_is_still_being_written(group: Group) -> None:
    group.start(1)
    assert not group.saver.wait(0.05) and group.saver.waits_for_ranks
    group.other.set(state_key(1, 1), snapshot.plain_bytes({}))
    assert group.saver.wait(60) and not group.saver.waits_for_ranks


# --- without a group ---


class Told:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def test_pauses_between_tries_double_up_to_a_minute(tmp_path: Path) -> None:
    told, pauses = Told(), list[float]()
    writer = CheckpointWriter(make_spec(max_failures=9), told, None)  # type: ignore[arg-type]
    writer._hurry = SimpleNamespace(is_set=lambda: False, wait=pauses.append)  # type: ignore[assignment]
    folder = tmp_path / "checkpoint-0"

    def write() -> Any:
        folder.mkdir()  # a failed write leaves nothing
        raise OSError(28, "No space left on device")

    save: Any = SimpleNamespace(folder=folder, step=7)
    with pytest.raises(OSError, match="No space left"):
        writer._write_with_retries(save, write)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] and not folder.exists()
    assert [(event.step, event.failures, event.given_up) for event in told.events] == [
        *((7, failures, False) for failures in range(1, 9)),
        (7, 9, True),
    ]


@pytest.mark.parametrize(("before", "tries"), [(True, 1), (False, 1)])
def test_failed_write_is_not_repeated_in_a_hurry(tmp_path: Path, before: bool, tries: int) -> None:
    told, tried = Told(), list[int]()
    writer = CheckpointWriter(make_spec(max_failures=9), told, None)  # type: ignore[arg-type]
    hurry = SimpleNamespace(is_set=lambda: before, wait=lambda pause_s: True)  # it comes before or in the pause
    writer._hurry = hurry  # type: ignore[assignment]

    def write() -> Any:
        tried.append(1)
        raise OSError("disk")

    save: Any = SimpleNamespace(folder=tmp_path / "checkpoint-0", step=7)
    with pytest.raises(OSError, match="disk"):
        writer._write_with_retries(save, write)
    assert len(tried) == tries
    assert [(event.message, event.given_up) for event in told.events] == [("disk", before)]


@pytest.mark.parametrize(("asynchronous", "niceness"), [(True, [5]), (False, [])])
def test_thread_that_writes_beside_the_training_has_a_low_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, niceness: list[int]
) -> None:
    given: list[int] = []

    def set_priority(which: int, who: int, priority: int) -> None:
        assert (which, who) == (os.PRIO_PROCESS, threading.get_native_id())
        given.append(priority)
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", set_priority)
    told = Told()
    spec = make_spec(world_size=1, asynchronous=asynchronous)
    written: list[Any] = []
    writer = CheckpointWriter(spec, told, None, lambda *of: written.append(of))  # type: ignore[arg-type]
    folder = tmp_path / "checkpoint-0"
    own = plain_bytes({"rank": 0, "metrics": {"loss": 1.0}})
    save = PendingCheckpoint(1, 7, 0.5, folder, Snapshot({}, {}, {"step": 7}), own)
    writer._run(save)
    assert given == niceness and writer.error is None
    (saved,) = told.events
    assert (saved.step, saved.staging, saved.epoch, saved.metrics) == (7, "checkpoint-0", 0.5, {"loss": 1.0})
    assert written == [(7, folder, {"loss": 1.0})]


def test_error_of_a_checkpoint_is_raised_once() -> None:
    writer = CheckpointWriter(make_spec(), None, None)  # type: ignore[arg-type]
    assert writer.wait() and not writer.is_writing
    writer.error = RuntimeError("store")
    with pytest.raises(RuntimeError, match="store"):
        writer.wait()
    assert writer.wait()
