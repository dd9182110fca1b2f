"""Checkpoints: what is in them, what is refused, what a full disk does, when they are due, and how ranks end."""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddptrain.errors import CheckpointNotWritten
from ddptrain.file_ops import hash_file
from ddptrain.protocol import events
from ddptrain.rank.agreement import Agreement
from ddptrain.rank.checkpoint import files
from ddptrain.rank.checkpoint.files import read_state
from ddptrain.rank.checkpoint.snapshot import HostBuffers, from_bytes
from ddptrain.rank.context import PreemptedExit
from ddptrain.workloads.checkpoint import load_checkpoint
from ddptrain.workloads.images.train import _known_classes
from tests.unit.rank.ranks import CPU, Gang, MakeRank, Rank, full_after, make_rank, rank

__all__ = ["make_rank", "rank"]


def folder_of(rank: Rank) -> Path:
    """The folder of the newest checkpoint."""
    return rank.folder / "staging" / str(rank.events(events.CheckpointSaved)[-1].staging)


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


def test_tied_weights_buffers_and_extra_state_are_restored(rank: Rank, make_rank: MakeRank) -> None:
    model = Tied()
    model.seen = 5
    rank.context.checkpoint(model=model, step=1)
    other = Tied()
    make_rank(resume_from=str(folder_of(rank))).context.resume(model=other)
    assert other.second.weight is other.first.weight
    for name, value in model.state_dict().items():
        assert name == "_extra_state" or torch.equal(value, other.state_dict()[name])
    assert other.seen == 5
    stored = load_file(folder_of(rank) / "model.safetensors")
    assert sorted(stored) == ["first.weight", "narrow", "one", "second.bias"]


def test_only_a_tensor_as_a_whole_is_tied(rank: Rank) -> None:
    base, model = torch.arange(4.0), torch.nn.Module()
    views = [base, base, base[:2], base[2:], base.view(torch.int32), base.view(2, 2), base.view(2, 2).t()]
    for number, view in enumerate([*views, torch.zeros(0), torch.zeros(0)]):
        model.register_buffer(f"b{number}", view)
    rank.context.checkpoint(model=model, step=1)
    assert sorted(load_file(folder_of(rank) / "model.safetensors")) == ["b0", *(f"b{number}" for number in range(2, 9))]


def test_optimizer_scheduler_data_and_random_numbers_continue(rank: Rank, make_rank: MakeRank) -> None:
    model = torch.nn.Linear(520, 520)  # the state of its optimizer is larger than 1 MiB
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(torch.ones(2, 520)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert rank.context.resume(model=model) is None
    more: dict[str, Any] = {"scheduler": scheduler, "note": {"a": (1, 2)}}
    rank.context.checkpoint(model=model, optimizer=optimizer, step=3, epoch=1, rank_state=[5], **more)
    drawn = [random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))]
    again, other_model = make_rank(resume_from=str(folder_of(rank))), torch.nn.Linear(520, 520)
    other = torch.optim.Adam(other_model.parameters(), lr=0.1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    found = again.context.resume(model=other_model, optimizer=other, scheduler=other_scheduler)
    assert [random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))] == drawn
    assert found is not None
    assert (found.step, found.epoch, found.rank_state, found.world_size) == (3, 1, [5], 1)
    assert found.data == {"note": {"a": (1, 2)}}
    assert other_scheduler.last_epoch == 1 and other.param_groups[0]["lr"] == 0.25
    for one, same in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(one, same) and torch.equal(optimizer.state[one]["exp_avg"], other.state[same]["exp_avg"])


def test_weights_that_do_not_fit_are_named(rank: Rank, make_rank: MakeRank) -> None:
    rank.context.checkpoint(model=torch.nn.Linear(2, 2), step=1)
    with pytest.raises(RuntimeError, match="bias"):
        make_rank(resume_from=str(folder_of(rank))).context.resume(model=torch.nn.Linear(2, 2, bias=False))


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
def test_safetensors_reads_every_type_and_large_state_has_a_file(rank: Rank) -> None:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
    model = torch.nn.Module()
    for number, kind in enumerate(kinds):
        model.register_buffer(f"b{number}", torch.arange(number + 1).to(kind))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    moments: list[Any] = [torch.randn(600, 600), 3]
    rank.context.checkpoint(model=model, step=1, moments=moments, few=torch.ones(2), sparse=torch.eye(2).to_sparse())
    (event,) = rank.events()
    folder = folder_of(rank)
    for file in event.files:
        assert hash_file(folder / file.name) == (file.size_bytes, file.sha256)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())
    assert {file.name for file in event.files} == {"model.safetensors", "tensors.safetensors", "state.pt"}
    assert (folder / "state.pt").stat().st_size < 100_000
    extra = read_state(folder)["extra"]
    assert torch.equal(extra["moments"][0], moments[0]) and extra["moments"][1] == 3
    assert torch.equal(extra["sparse"].to_dense(), torch.eye(2))


def test_checkpoint_is_the_state_at_the_call(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues while the checkpoint is written, also into memory of the previous one."""
    go = threading.Event()
    write = files.write
    monkeypatch.setattr(files, "write", lambda *args: (go.wait(60), write(*args))[1])
    model, history = torch.nn.Linear(2, 2), [1]
    for step in (1, 2):
        before = model.weight.detach().clone()
        rank.context.checkpoint(model=model, step=step, history=history)
        with torch.no_grad():
            model.weight.add_(1)
        history.append(2)
        go.set()
        rank.context.close()
        assert torch.equal(load_file(folder_of(rank) / "model.safetensors")["weight"], before)
        assert read_state(folder_of(rank))["extra"] == {"history": [1, 2][:step]}


def test_containers_keep_their_type_and_numbers_of_numpy_become_plain() -> None:
    for value in ([1, [2]], (1, (2,)), {1, 2}, {"a": {"b": 1}}, OrderedDict(a=1)):
        copy = HostBuffers().plain(value)
        assert copy == value and copy is not value and type(copy) is type(value)
    assert type(HostBuffers().plain(np.float32(1.5))) is float


# --- No checkpoint executes a program: whoever can write one must not run programs ---


class Settings:
    """An object that only loads by executing a pickle."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: 1, r"not function \(.*pickle.*lambda"),
        (Settings(), r"not Settings \(Unsupported global: GLOBAL \S+Settings was not an allowed global"),
    ],
)
@pytest.mark.parametrize("name", ["extra", "rank_state"])
def test_state_that_needs_a_pickle_is_refused_in_plain_text(rank: Rank, value: object, reason: str, name: str) -> None:
    with pytest.raises(TypeError, match=reason) as caught:
        rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=1, **{name: value})  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith(f"'{name}' of the checkpoint must load without executing a pickle: ")
    assert "\x1b" not in text and "\n" not in text and "weights_only" not in text
    assert rank.events() == []


@pytest.mark.parametrize(
    ("tensor", "said"),
    [(torch.zeros(1, dtype=torch.complex128), "complex128, torch.strided"), (torch.eye(2).to_sparse(), "sparse_coo")],
)
def test_weight_that_no_file_can_hold_is_refused_with_its_name(rank: Rank, tensor: torch.Tensor, said: str) -> None:
    model = torch.nn.Identity()
    model.register_buffer("wave", tensor)
    with pytest.raises(TypeError, match=rf"the weight 'wave' can't be saved: torch\..*{said}"):
        rank.context.checkpoint(model=model, step=1)


class Program:
    """Makes a folder when it is loaded by executing the pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "read",
    [
        read_state,
        lambda folder: from_bytes((folder / "state.pt").read_bytes()),
        lambda folder: load_checkpoint(folder, "images", lambda config: torch.nn.Linear(1, 1)),
        lambda folder: _known_classes({"a": folder}),
    ],
)
def test_program_in_a_checkpoint_is_not_executed(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    file = io.BytesIO()
    torch.save({"extra": Program(tmp_path / "executed")}, file)
    (tmp_path / "state.pt").write_bytes(file.getvalue())
    with contextlib.suppress(Exception):  # each reader has an error of its own, or none
        read(tmp_path)
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / "state.pt", weights_only=False)  # what readers must not do
    assert (tmp_path / "executed").exists()


# --- When a checkpoint is due, and what happens if it cannot be written ---


def test_checkpoints_are_due_every_so_many_epochs_and_at_the_last(make_rank: MakeRank) -> None:
    rank, model = make_rank(every_epochs=3), torch.nn.Linear(1, 1)
    due = [rank.context.checkpoint(model=model, step=e, epoch=e, last=e == 7) for e in range(1, 8)]
    assert due == [False, False, True, False, False, True, True]


def test_metrics_are_read_only_for_a_checkpoint_that_is_due(make_rank: MakeRank) -> None:
    rank, model, loss = make_rank(every_epochs=2), torch.nn.Linear(1, 1), Mock()
    loss.shape, loss.item.return_value = (), 0.5  # a value on a GPU, for which the rank would wait
    rank.context.checkpoint(model=model, step=1, epoch=1, metrics={"val/loss": loss})
    assert not loss.item.called
    rank.context.checkpoint(model=model, step=2, epoch=2, metrics={"val/loss": loss})
    assert [event.metrics for event in rank.events(events.CheckpointSaved)] == [{"val/loss": 0.5}]


def test_step_of_a_checkpoint_is_whole(rank: Rank) -> None:
    for step, text in ((1.5, "step must be a whole number, not 1.5"), (None, "'step' is None"), ("3", "'step' is '3'")):
        with pytest.raises(TypeError, match=text):
            rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=step)  # type: ignore[arg-type]
    assert rank.events() == []


def test_full_disk_is_an_error_of_the_next_call_and_leaves_no_file(rank: Rank) -> None:
    small, large = torch.nn.Linear(1, 1), torch.nn.Linear(500, 500)
    with full_after(100_000):
        rank.context.checkpoint(model=large, step=1)
        with pytest.raises(CheckpointNotWritten, match=r"could not be written into /.*: File too large"):
            rank.context.close()
    assert list((rank.folder / "staging").iterdir()) == []  # half a checkpoint would keep the disk full
    rank.context.checkpoint(model=small, step=2)
    assert [saved.step for saved in rank.events()] == [2]


def test_synchronous_checkpoint_is_complete_when_the_call_returns(make_rank: MakeRank) -> None:
    rank = make_rank(asynchronous=False)
    rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=1)
    assert (rank.folder / "staging/checkpoint-0/state.pt").exists()
    assert b'"checkpoint"' in (rank.folder / "events").read_bytes()


def test_preempted_rank_saves_whatever_is_due_and_ends(make_rank: MakeRank) -> None:
    rank, model = make_rank(every_epochs=None, every_steps=100), torch.nn.Linear(1, 1)
    assert not rank.context.checkpoint(model=model, step=1)
    flags = [rank.context.preempted]
    rank.context._agreement.end()
    assert [*flags, rank.context.preempted] == [False, True]
    with pytest.raises(PreemptedExit) as caught:
        rank.context.checkpoint(model=model, step=2)
    assert caught.value.code == 75
    assert [(event.kind, event.step) for event in rank.events()] == [("checkpoint", 2), ("preempted", 2)]


def test_last_checkpoint_of_all_is_the_end_of_training_with_or_without_a_notice(rank: Rank) -> None:
    rank.context._agreement.end()
    assert rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=2, last=True)
    assert [event.kind for event in rank.events()] == ["checkpoint"]


# --- Several ranks ---


def test_other_ranks_write_nothing_but_send_their_state_to_rank_0(make_rank: MakeRank) -> None:
    worker_group, model = Gang(), torch.nn.Linear(1, 1)
    ranks = [make_rank(worker_group.spec(number, 2)) for number in range(2)]
    for each in ranks:
        assert each.context.checkpoint(
            model=model,
            step=1,
            metrics={"l": each.context.rank},
            rank_state={"position": each.context.rank + 10},
        )
    (event,) = ranks[0].events()
    assert isinstance(event, events.CheckpointSaved) and event.metrics == {"l": 0.5}
    assert ranks[1].events() == [] and list((ranks[1].folder / "staging").iterdir()) == []
    states = read_state(folder_of(ranks[0]))["ranks"]
    assert [state["rank_state"] for state in states] == [{"position": 10}, {"position": 11}]


def test_rank_that_does_not_call_is_reported_and_not_waited_for(make_rank: MakeRank) -> None:
    worker_group = Gang()
    rank = make_rank(worker_group.spec(0, 2))
    assert rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=1)
    Agreement(worker_group.spec(1, 2)).give_no_more()
    note, event = rank.events()
    assert "rank 1 did not call ctx.checkpoint" in note.message and isinstance(event, events.CheckpointSaved)


def test_late_rank_does_not_drop_the_checkpoints_and_is_named_once(make_rank: MakeRank) -> None:
    worker_group = Gang()
    rank = make_rank(worker_group.spec(0, 2, timeout_s=0.2))
    for step in (10, 20):
        rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=step)
    note, first, second = rank.events()
    assert note.level == "warning"
    assert note.message.startswith("rank 1 did not call ctx.checkpoint for step 10: its random state is not saved")
    assert (first.step, second.step) == (10, 20)


def test_other_number_of_ranks_is_named_and_gets_new_random_states(rank: Rank, make_rank: MakeRank) -> None:
    model = torch.nn.Linear(1, 1)
    rank.context.checkpoint(model=model, step=1, rank_state=1)
    worker_group = Gang()
    threading.Thread(target=Agreement(worker_group.spec(1, 2)).meet, args=("resume",), daemon=True).start()
    again = make_rank(worker_group.spec(0, 2), resume_from=str(folder_of(rank)))
    found = again.context.resume(model=model)
    assert found is not None and (found.rank_state, found.world_size) == (None, 1)
    assert "the checkpoint is of 1 ranks, this run has 2" in again.events()[0].message


@pytest.fixture
def unchanged_random() -> Iterator[None]:
    before = files.capture_random(CPU)
    yield
    files.restore_random(before, CPU)


@pytest.mark.usefixtures("unchanged_random")
def test_new_ranks_draw_differently_but_the_same_each_time() -> None:
    state = files.capture_random(CPU)

    def first_draws(rank: int) -> list[float]:
        files.reseed_random(state, rank)
        return [random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))]

    assert first_draws(0) == first_draws(0)
    assert len({value for rank in range(3) for value in first_draws(rank)}) == 9
