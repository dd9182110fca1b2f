"""What rank 0 does about the states of other ranks: gathered, late, missing, or in a hurry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.protocol import events
from ddptrain.rank.agreement import WorkerGroupStore
from ddptrain.rank.checkpoint import files, snapshot
from ddptrain.rank.checkpoint.snapshot import Snapshot, plain_bytes
from ddptrain.rank.checkpoint.writer import CheckpointWriter, PendingCheckpoint, done_key, state_key
from ddptrain.rank.output import Emitter
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
        return files.read_state(self.folder / f"checkpoint-{number}")["ranks"]

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


def test_wait_reports_that_a_checkpoint_is_still_being_written(group: Group) -> None:
    group.start(1)
    assert not group.saver.wait(0.05)
    group.other.set(state_key(1, 1), snapshot.plain_bytes({}))
    assert group.saver.wait(60)


# --- without a group ---


class Told:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def test_error_of_a_checkpoint_is_raised_once() -> None:
    writer = CheckpointWriter(make_spec(), None, None)  # type: ignore[arg-type]
    assert writer.wait()
    writer.error = RuntimeError("store")
    with pytest.raises(RuntimeError, match="store"):
        writer.wait()
    assert writer.wait()
