"""Checkpoints are written beside the training: what is in them, what a full disk does, and how ranks end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddptrain.errors import CheckpointNotWritten
from ddptrain.file_ops import hash_file
from ddptrain.protocol import events
from ddptrain.rank.agreement import Agreement
from ddptrain.rank.checkpoint import files
from ddptrain.rank.context import PreemptedExit
from tests.support.pace import is_cheap
from tests.unit.rank.stores import Gang
from tests.unit.rank.test_context import Rank
from tests.unit.rank.test_output import full_after


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.file.close()


class Tied(torch.nn.Module):
    """Two layers with one weight, a buffer of half precision, an extra state, and a version that is asked for."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("narrow", torch.arange(5).to(torch.bfloat16))
        self.register_buffer("one", torch.tensor(7))
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        assert local_metadata.get("version") == 2  # as torchvision's MNASNet does
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


def resumed_in(folder: Path, rank: Rank, **changes: Any) -> Rank:
    """A rank of another attempt that goes on from the newest checkpoint of `rank`."""
    *_, saved = [event for event in rank.events() if isinstance(event, events.CheckpointSaved)]
    folder.mkdir()
    return Rank(folder, resume_from=str(rank.folder / "staging" / saved.staging), **changes)


def test_tied_weights_buffers_and_extra_state_come_back(rank: Rank, tmp_path: Path) -> None:
    model = Tied()
    model.seen = 5
    rank.context.checkpoint(model=model, step=1)
    again = resumed_in(tmp_path / "again", rank)
    other = Tied()
    again.context.resume(model=other)
    assert other.second.weight is other.first.weight
    for name, value in model.state_dict().items():
        assert name == "_extra_state" or torch.equal(value, other.state_dict()[name])
    assert other.seen == 5
    stored = load_file(rank.folder / "staging/checkpoint-0/model.safetensors")
    assert sorted(stored) == ["first.weight", "narrow", "one", "second.bias"]
    again.file.close()


def test_weights_that_do_not_fit_are_named(rank: Rank, tmp_path: Path) -> None:
    rank.context.checkpoint(model=torch.nn.Linear(2, 2), step=1)
    again = resumed_in(tmp_path / "again", rank)
    with pytest.raises(RuntimeError, match="bias"):
        again.context.resume(model=torch.nn.Linear(2, 2, bias=False))
    again.file.close()


def test_safetensors_reads_every_type_and_large_state_lies_in_a_file_of_its_own(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
    model = torch.nn.Module()
    for number, kind in enumerate(kinds):
        model.register_buffer(f"b{number}", torch.arange(number + 1).to(kind))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    moments: list[Any] = [torch.randn(600, 600), 3]
    rank.context.checkpoint(model=model, step=1, moments=moments, few=torch.ones(2))
    (event,) = rank.events()
    assert isinstance(event, events.CheckpointSaved)
    folder = tmp_path / "staging" / event.staging
    for file in event.files:
        assert hash_file(folder / file.name) == (file.size_bytes, file.sha256)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())
    assert {file.name for file in event.files} == {"model.safetensors", "tensors.safetensors", "state.pt"}
    assert (folder / "state.pt").stat().st_size < 100_000
    extra = files.read_state(folder)["extra"]
    assert torch.equal(extra["moments"][0], moments[0]) and extra["moments"][1] == 3
    rank.file.close()


def test_what_is_saved_is_what_was_there_at_the_call(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while the checkpoint is being written."""
    go = threading.Event()
    write = files.write
    monkeypatch.setattr(files, "write", lambda *args: (go.wait(60), write(*args))[1])
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    history = [1]
    rank.context.checkpoint(model=model, step=1, history=history)
    with torch.no_grad():
        model.weight.zero_()
    history.append(2)
    go.set()
    rank.context.close()
    folder = rank.folder / "staging/checkpoint-0"
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], before)
    assert files.read_state(folder)["extra"] == {"history": [1]}


def test_scheduler_and_sampler_come_back_and_random_numbers_go_on(rank: Rank, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    rank.context.checkpoint(
        model=model, optimizer=optimizer, step=1, scheduler=scheduler, note={"a": (1, 2)}, rank_state=[5]
    )
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    again = resumed_in(tmp_path / "again", rank)
    other = torch.optim.Adam(model.parameters(), lr=0.1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    found = again.context.resume(model=model, optimizer=other, scheduler=other_scheduler)
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn
    assert found is not None
    assert (found.rank_state, found.world_size, found.data["note"]) == ([5], 1, {"a": (1, 2)})
    assert other_scheduler.last_epoch == 1 and other.param_groups[0]["lr"] == 0.25
    again.file.close()


def test_other_ranks_than_before_are_told_and_get_new_random_states(rank: Rank, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    rank.context.checkpoint(model=model, step=1, rank_state=1)
    worker_group = Gang()
    threading.Thread(target=Agreement(worker_group.spec(1, 2)).meet, args=("resume",), daemon=True).start()
    again = resumed_in(
        tmp_path / "again", rank, world_size=2, master_addr="127.0.0.1", master_port=worker_group.store.port
    )
    found = again.context.resume(model=model)
    assert found is not None and (found.rank_state, found.world_size) == (None, 1)
    note, _ = again.events()
    assert isinstance(note, events.Note) and "the checkpoint is of 1 ranks, this run has 2" in note.message
    again.file.close()


def test_a_full_disk_is_an_error_of_the_next_call_and_leaves_no_file(rank: Rank) -> None:
    small, large = torch.nn.Linear(1, 1), torch.nn.Linear(500, 500)
    with full_after(100_000):
        rank.context.checkpoint(model=large, step=1)
        with pytest.raises(CheckpointNotWritten, match=r"could not be written into /.*: File too large"):
            rank.context.close()
    assert list((rank.folder / "staging").iterdir()) == []  # half a checkpoint would keep the disk full
    rank.context.checkpoint(model=small, step=2)
    (saved,) = rank.events()
    assert isinstance(saved, events.CheckpointSaved) and saved.step == 2


def test_synchronous_checkpoint_is_there_when_the_call_returns(tmp_path: Path) -> None:
    rank = Rank(tmp_path, asynchronous=False)
    rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=1)
    assert (tmp_path / "staging/checkpoint-0/state.pt").exists()
    assert b'"checkpoint"' in (tmp_path / "events").read_bytes()
    rank.file.close()


def test_preempted_rank_saves_whatever_is_due_and_ends(tmp_path: Path) -> None:
    rank = Rank(tmp_path, every_epochs=None, every_steps=100)
    model = torch.nn.Linear(1, 1)
    assert not rank.context.checkpoint(model=model, step=1)
    flags = [rank.context.preempted]
    rank.context._agreement.end()
    assert [*flags, rank.context.preempted] == [False, True]
    with pytest.raises(PreemptedExit) as caught:
        rank.context.checkpoint(model=model, step=2)
    assert caught.value.code == 75
    saved, ended = rank.events()
    assert isinstance(saved, events.CheckpointSaved) and saved.step == 2
    assert isinstance(ended, events.Preempted) and ended.step == 2
    rank.file.close()


def test_last_checkpoint_of_all_is_the_end_of_training_notice_or_not(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.context._agreement.end()
    assert rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=2, last=True)
    assert [event.kind for event in rank.events()] == ["checkpoint"]
    rank.file.close()


def test_call_that_is_not_due_takes_microseconds(tmp_path: Path) -> None:
    rank = Rank(tmp_path, every_epochs=1, every_steps=10**9, every_s=3600.0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def call(step: int) -> None:
        state = {"loss_sum": 1.0, "n": 3}
        rank.context.checkpoint(model=model, optimizer=optimizer, step=step, epoch=0.5, rank_state=state, a=[], b=1)

    assert is_cheap(call, 5e-6)
    rank.file.close()
