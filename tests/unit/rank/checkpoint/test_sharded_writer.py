"""Ranks write the slices of a sharded model: the driver is told once all have done so, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.protocol import events
from ddptrain.rank.agreement import WorkerGroupStore
from ddptrain.rank.checkpoint import files
from ddptrain.rank.checkpoint.snapshot import Shards, Snapshot, plain_bytes
from ddptrain.rank.checkpoint.writer import CheckpointWriter, PendingCheckpoint, done_key
from ddptrain.rank.output import Emitter
from ddptrain.workloads.saved_weights import read_weights
from tests.unit.rank.stores import Gang


class ShardedRank:
    """The writer of one of two ranks; each has one row of a weight."""

    def __init__(self, gang: Gang, folder: Path, rank: int, **changes: Any) -> None:
        self.rank, self.folder = rank, folder / str(rank)
        self.folder.mkdir()
        self.file = (self.folder / "events").open("ab", buffering=0)
        spec = gang.spec(rank, 2, staging=str(self.folder), **changes)
        self.store = WorkerGroupStore(spec)
        self.writer = CheckpointWriter(spec, Emitter(self.file.fileno()), self.store)

    def start(self, number: int = 1) -> None:
        row = torch.full((1, 3), float(self.rank))
        shards = Shards({"w": row}, {"w": ((2, 3), (self.rank, 0))}, {}, {}, {}, {}, None)
        snapshot = Snapshot({}, {}, {"step": number, "extra": {}, "optimizer": None}, shards)
        own = plain_bytes({"rank": self.rank})
        self.writer.start(PendingCheckpoint(number, number, None, self.staging(number), snapshot, own))

    def staging(self, number: int = 1) -> Path:
        return self.folder / f"checkpoint-{number}"

    def events(self) -> list[events.Event]:
        return [events.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[ShardedRank, ShardedRank]]:
    gang = Gang()
    made = ShardedRank(gang, tmp_path, 0), ShardedRank(gang, tmp_path, 1)
    yield made
    for rank in made:
        rank.file.close()


def test_rank_zero_tells_the_driver_when_the_files_of_all_ranks_are_there(
    ranks: tuple[ShardedRank, ShardedRank], tmp_path: Path
) -> None:
    first, second = ranks
    first.start()
    assert not first.writer.wait(0.3)
    assert first.events() == []
    second.start()
    assert second.writer.wait(20) and first.writer.wait(20)
    (saved,) = first.events()
    assert isinstance(saved, events.CheckpointSaved)
    assert [file.name for file in saved.files] == ["model.rank-0.safetensors", "state.pt"]
    (part,) = saved.parts
    assert (part.rank, part.staging, [file.name for file in part.files]) == (
        1,
        "checkpoint-1",
        ["model.rank-1.safetensors"],
    )
    assert second.events() == []
    together = tmp_path / "together"
    together.mkdir()
    for rank in ranks:
        for path in rank.staging().iterdir():
            path.rename(together / path.name)
    assert torch.equal(read_weights(together)["w"], torch.tensor([[0.0] * 3, [1.0] * 3]))
    assert files.read_state(together)["ranks"] == [{"rank": 0}, {"rank": 1}]


def test_nothing_is_saved_without_the_slices_of_a_rank(ranks: tuple[ShardedRank, ShardedRank]) -> None:
    first, second = ranks
    second.store.set(done_key(1), "")
    first.start()
    assert first.writer.wait(20)
    (note,) = first.events()
    assert isinstance(note, events.Note)
    assert note.message == (
        "rank 1 did not call ctx.checkpoint for step 1: no checkpoint of the sharded model is saved; "
        "all ranks must call it"
    )
    assert not first.staging().exists()


def test_rank_that_dies_while_it_writes_leaves_no_checkpoint(ranks: tuple[ShardedRank, ShardedRank]) -> None:
    first, _ = ranks
    first.start()
    assert not first.writer.wait(0.2)
    assert first.writer.wait(20, hurry=True)  # as when the worker group is stopped
    assert first.events() == []
    assert not first.staging().exists()
