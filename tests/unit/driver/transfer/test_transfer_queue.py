"""What the run directory has no room for is tried again, and told of."""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.driver.inbox import ArtifactFailed, ArtifactRetried, ArtifactStored, Inbox
from ddptrain.driver.transfer.transfer_queue import Source, TransferQueue
from ddptrain.protocol.events import CheckpointPart, CheckpointSaved, FileSaved
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.run_writer import RunWriter
from tests.unit.results.conftest import stage, writer

__all__ = ["stage", "writer"]


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def sources() -> dict[int, Source]:
    """Where the files of each rank are."""
    return {}


@pytest.fixture
def transfer(writer: RunWriter, inbox: Inbox, sources: dict[int, Source]) -> Iterator[TransferQueue]:
    made = TransferQueue(writer, CheckpointPolicy(), inbox, sources.__getitem__, max_failures=3)
    yield made
    assert made.close(60)


@pytest.fixture
def bring(transfer: TransferQueue, sources: dict[int, Source]) -> Callable[[tuple[CheckpointSaved, Path]], None]:
    def add(staged: tuple[CheckpointSaved, Path]) -> None:
        event, folder = staged
        sources[0] = Source(folder.parent, None)
        transfer.add(0, event)

    return add


def block(writer: RunWriter) -> Path:
    """Put a file where the folder of the checkpoints should be, so that none can be written."""
    folder = writer.layout.checkpoints_dir
    if folder.is_dir():
        folder.rmdir()
    folder.write_bytes(b"")
    return folder


def test_checkpoint_that_cannot_be_written_is_stored_later(
    bring: Any, transfer: TransferQueue, inbox: Inbox, stage: Any
) -> None:
    blocked = block(transfer.writer)
    bring(stage(1))
    retried = inbox.get(timeout=60)
    assert isinstance(retried, ArtifactRetried) and retried.failure == "failure 1 of 3; again in 1 s"
    blocked.unlink()
    assert isinstance(inbox.get(timeout=60), ArtifactStored)
    assert (blocked / "step-1" / "model.safetensors").read_bytes() == b"w" * 1000
    assert (blocked / "latest").read_text() == "step-1\n"


def test_checkpoint_is_given_up_after_some_failures_and_the_next_one_after_one(
    bring: Any, transfer: TransferQueue, inbox: Inbox, stage: Any
) -> None:
    block(transfer.writer)
    for step in (1, 2):
        bring(stage(step))
    messages = [type(inbox.get(timeout=60)) for _ in range(4)]
    assert messages == [ArtifactRetried, ArtifactRetried, ArtifactFailed, ArtifactFailed]


def test_damaged_checkpoint_is_not_tried_again(bring: Any, transfer: TransferQueue, inbox: Inbox, stage: Any) -> None:
    event, folder = stage(1)
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    bring((event, folder))
    assert isinstance(inbox.get(timeout=60), ArtifactFailed)


@pytest.mark.parametrize(("area", "vital"), [("artifacts", True), ("tracking", False), ("elsewhere", True)])
def test_run_can_do_without_what_trackers_have_written(
    transfer: TransferQueue, inbox: Inbox, sources: dict[int, Source], tmp_path: Path, area: str, vital: bool
) -> None:
    (tmp_path / "file-0").write_bytes(b"other than announced")
    sources[0] = Source(tmp_path, None)
    transfer.add(0, FileSaved(1, "a/b", "file-0", 3, "ab", area))
    message = inbox.get(timeout=60)
    assert isinstance(message, ArtifactFailed)
    assert message.vital is vital


def test_checkpoint_with_files_of_an_unknown_rank_is_not_added(
    transfer: TransferQueue, inbox: Inbox, sources: dict[int, Source], stage: Any
) -> None:
    event, folder = stage(1)
    event = dataclasses.replace(event, parts=(CheckpointPart(7, "checkpoint-0", event.files),))
    sources[0] = Source(folder.parent, None)
    transfer.add(0, event)
    failed = inbox.get(timeout=60)
    assert isinstance(failed, ArtifactFailed) and "files of rank 7, which does not exist" in str(failed.error)
    assert not (transfer.writer.layout.checkpoints_dir / "step-1").exists()


def test_files_of_a_rank_on_another_machine_are_fetched_from_there(
    transfer: TransferQueue, inbox: Inbox, sources: dict[int, Source], stage: Any
) -> None:
    event, folder = stage(1)
    other, there = stage(1, contents={"model.rank-1.safetensors": b"remote"})
    event = dataclasses.replace(event, parts=(CheckpointPart(1, other.staging, other.files),))

    def fetch(path: Path, offset: int, size: int) -> bytes:
        return path.read_bytes()[offset : offset + size]

    sources |= {0: Source(folder.parent, None), 1: Source(there.parent, fetch)}
    transfer.add(0, event)
    assert isinstance(inbox.get(timeout=60), ArtifactStored)
    home = transfer.writer.layout.checkpoints_dir / "step-1"
    assert (home / "model.rank-1.safetensors").read_bytes() == b"remote"
    assert not list(transfer.writer.layout.scratch_dir.glob("fetched-*"))


def test_file_of_a_lost_worker_is_out_of_reach_and_no_fault_of_the_run_directory(
    transfer: TransferQueue, inbox: Inbox, sources: dict[int, Source], stage: Any
) -> None:
    event, folder = stage(1)

    def fetch(path: Path, offset: int, size: int) -> bytes:
        raise ConnectionError("no route")

    sources[0] = Source(folder.parent, fetch)
    transfer.add(0, event)
    failed = inbox.get(timeout=60)
    assert isinstance(failed, ArtifactFailed) and failed.unreachable and str(failed.error) == "no route"


def slow_file(writer: RunWriter, inbox: Inbox, folder: Path, fetch: Callable[[Path, int, int], bytes]) -> TransferQueue:
    data = b"0123456789"
    event = FileSaved(1, "a", "file-0", len(data), hashlib.sha256(data).hexdigest(), "artifacts")
    transfer = TransferQueue(writer, CheckpointPolicy(), inbox, lambda rank: Source(folder, fetch))
    transfer.add(0, event)
    return transfer


def test_transfer_is_waited_for_as_long_as_bytes_move(writer: RunWriter, inbox: Inbox, tmp_path: Path) -> None:
    def fetch(path: Path, offset: int, size: int) -> bytes:
        time.sleep(0.3)
        return b"0123456789"[offset : offset + 1]

    transfer = slow_file(writer, inbox, tmp_path, fetch)
    assert transfer.close(2.0)  # though it takes 3 s
    assert isinstance(inbox.get(timeout=60), ArtifactStored) and transfer.pending == []


def test_transfer_that_moves_nothing_is_given_up(writer: RunWriter, inbox: Inbox, tmp_path: Path) -> None:
    released = threading.Event()

    def fetch(path: Path, offset: int, size: int) -> bytes:
        released.wait(60)
        return b"0"

    transfer = slow_file(writer, inbox, tmp_path, fetch)
    assert not transfer.close(0.1)
    assert [each.what for each in transfer.pending] == ["artifact a"]
    released.set()
    assert isinstance(inbox.get(timeout=60), ArtifactFailed)
