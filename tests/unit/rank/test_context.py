"""The events and staged files that a workload's calls produce."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddptrain.protocol import events
from ddptrain.rank.agreement import Agreement
from ddptrain.rank.context import RankContext
from ddptrain.rank.output import Emitter
from tests.unit.rank.stores import Gang
from tests.unit.specs import make_spec

_GANG = ("rank", "placement", "group")


class Rank:
    """A context with its events file and staging folder."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self.file = (folder / "events").open("ab", buffering=0)
        spec = make_spec(**{"staging": str(folder / "staging"), "world_size": 1, **changes})
        (folder / "staging").mkdir()
        self.context = RankContext(spec, Emitter(self.file.fileno()), torch.device("cpu"))

    def events(self) -> list[events.Event]:
        """All events, after the last checkpoint is complete."""
        self.context.close()
        told = [events.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]
        return [event for event in told if not isinstance(event, events.Timed)]  # they depend on the machine's speed


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.file.close()


def test_logged_numbers_and_tensors_arrive_as_numbers(rank: Rank) -> None:
    rank.context.log({"train/loss": torch.tensor(0.5), "n": 3}, step=7, epoch=1.5)
    (event,) = rank.events()
    assert isinstance(event, events.Metrics)
    assert (event.values, event.step, event.epoch) == ({"train/loss": 0.5, "n": 3}, 7, 1.5)


@pytest.mark.parametrize("value", ["0.5", None, True, [1.0]])
def test_value_that_is_not_a_number_is_refused_with_its_name(rank: Rank, value: object) -> None:
    with pytest.raises(TypeError, match="'train/loss'"):
        rank.context.log({"train/loss": value})  # type: ignore[dict-item]


def test_progress_is_sent_rarely_but_its_end_is_always_sent(rank: Rank) -> None:
    for done in range(1, 1001):
        rank.context.progress(done, 1000)
    told = [event.done for event in rank.events() if isinstance(event, events.Progress)]
    assert told[0] == 1
    assert told[-1] == 1000
    assert len(told) < 500


def test_progress_takes_numbers_of_numpy_and_torch_and_nothing_else(rank: Rank) -> None:
    rank.context.progress(np.int64(3), torch.tensor(3))  # type: ignore[arg-type]
    (event,) = rank.events()
    assert isinstance(event, events.Progress) and (event.done, event.total) == (3, 3)
    with pytest.raises(TypeError, match="'done' is '3'"):
        rank.context.progress("3")  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"hello", "hello"])
def test_saved_data_is_staged_with_its_hash(rank: Rank, data: bytes | str) -> None:
    rank.context.save_file("samples/a.txt", data)
    (event,) = rank.events()
    assert isinstance(event, events.FileSaved)
    assert (event.path, event.size_bytes, event.sha256) == ("samples/a.txt", 5, hashlib.sha256(b"hello").hexdigest())
    assert (rank.folder / "staging" / event.staging).read_bytes() == b"hello"


def test_file_is_copied_when_it_is_saved(rank: Rank) -> None:
    source = rank.folder / "source.txt"
    source.write_text("before")
    rank.context.save_file("a.txt", source)
    source.write_text("after")
    (event,) = rank.events()
    assert isinstance(event, events.FileSaved)
    assert (rank.folder / "staging" / event.staging).read_text() == "before"


@pytest.mark.parametrize("path", ["../a.txt", "/etc/passwd", "a/../../b", ""])
def test_path_that_leaves_the_run_directory_is_refused_in_the_rank(rank: Rank, path: str) -> None:
    with pytest.raises(ValueError, match="save_file"):
        rank.context.save_file(path, b"")
    assert rank.events() == []


def test_checkpoint_holds_weights_and_a_state_without_pickles(rank: Rank) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert rank.context.checkpoint(model=model, optimizer=optimizer, step=3, epoch=1, metrics={"l": 1.0}, note=["x"])
    (event,) = rank.events()
    assert isinstance(event, events.CheckpointSaved)
    folder = rank.folder / "staging" / event.staging
    assert {file.name for file in event.files} == {"model.safetensors", "state.pt"}
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], model.weight)
    state = torch.load(folder / "state.pt", weights_only=True)
    assert (state["step"], state["epoch"], state["extra"]) == (3, 1, {"note": ["x"]})


def test_state_that_needs_a_pickle_is_refused(rank: Rank) -> None:
    with pytest.raises(TypeError, match="without executing a pickle"):
        rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=1, path=Path("/"))
    assert rank.events() == []


def test_checkpoints_are_due_every_so_many_epochs_and_at_the_last(tmp_path: Path) -> None:
    rank = Rank(tmp_path, every_epochs=3)
    model = torch.nn.Linear(1, 1)
    due = [rank.context.checkpoint(model=model, step=e, epoch=e, last=e == 7) for e in range(1, 8)]
    assert due == [False, False, True, False, False, True, True]
    rank.context.close()  # a checkpoint being written would use a descriptor number that belongs to another file then
    rank.file.close()


def test_other_ranks_write_nothing_but_send_their_state_to_rank_0(tmp_path: Path) -> None:
    worker_group = Gang()
    ranks = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        spec = worker_group.spec(number, 2)
        ranks.append(Rank(tmp_path / str(number), **{name: getattr(spec, name) for name in _GANG}))
    model = torch.nn.Linear(1, 1)
    for rank in ranks:
        assert rank.context.checkpoint(model=model, step=1, rank_state={"position": rank.context.rank + 10})
    (event,) = ranks[0].events()
    assert isinstance(event, events.CheckpointSaved)
    assert ranks[1].events() == [] and list((tmp_path / "1/staging").iterdir()) == []
    state = torch.load(tmp_path / "0/staging" / event.staging / "state.pt", weights_only=True)
    assert [rank["rank_state"] for rank in state["ranks"]] == [{"position": 10}, {"position": 11}]
    for rank in ranks:
        rank.file.close()


def test_rank_that_does_not_call_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    worker_group = Gang()
    spec = worker_group.spec(0, 2)
    rank = Rank(tmp_path, **{name: getattr(spec, name) for name in _GANG})
    assert rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=1)
    Agreement(worker_group.spec(1, 2)).give_no_more()
    note, event = rank.events()
    assert isinstance(note, events.Note) and "rank 1 did not call ctx.checkpoint" in note.message
    assert isinstance(event, events.CheckpointSaved)
    rank.file.close()


def test_late_rank_does_not_drop_the_checkpoints_and_is_named_once(tmp_path: Path) -> None:
    worker_group = Gang()
    spec = worker_group.spec(0, 2, timeout_s=0.2)
    rank = Rank(tmp_path, **{name: getattr(spec, name) for name in _GANG})
    for step in (10, 20):
        rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=step)
    note, first, second = rank.events()
    assert isinstance(note, events.Note) and note.level == "warning"
    assert note.message.startswith("rank 1 did not call ctx.checkpoint for step 10: its random state is not saved")
    assert isinstance(first, events.CheckpointSaved) and isinstance(second, events.CheckpointSaved)
    assert (first.step, second.step) == (10, 20)
    rank.file.close()


def test_resume_restores_what_was_saved(rank: Rank, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert rank.context.resume(model=model) is None
    rank.context.checkpoint(model=model, optimizer=optimizer, step=3, epoch=1, seen=12)
    rank.context.close()
    again = tmp_path / "again"
    again.mkdir()
    resumed = Rank(again, resume_from=str(rank.folder / "staging" / "checkpoint-0"))
    other = torch.nn.Linear(2, 1)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
    found = resumed.context.resume(model=other, optimizer=other_optimizer)
    assert found is not None
    assert (found.step, found.epoch, found.data) == (3, 1, {"seen": 12})
    assert torch.equal(other.weight, model.weight)
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    resumed.file.close()


def test_step_of_a_checkpoint_is_whole(rank: Rank) -> None:
    for step, text in ((1.5, "step must be a whole number, not 1.5"), (None, "'step' is None"), ("3", "'step' is '3'")):
        with pytest.raises(TypeError, match=text):
            rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=step)  # type: ignore[arg-type]
    assert rank.events() == []


def test_epochs_are_counted_from_1_and_set_in_each_loader(rank: Rank) -> None:
    assert list(rank.context.epochs(3)) == [1, 2, 3] and list(rank.context.epochs(0)) == []
    loaders = [rank.context.loader(range(4), batch_size=2) for _ in range(2)]  # type: ignore[arg-type]
    seen = [[loader.epoch for loader in loaders] for _ in rank.context.epochs(2)]
    assert seen == [[1, 1], [2, 2]]


# --- what is passed on ---


def test_rank_0_reports_how_long_a_block_took_unless_it_was_short(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
    ranks = [Rank(tmp_path / f"{number}", rank=number, world_size=2) for number in range(2)]
    for rank in ranks:
        with rank.context.timed("evaluation"):
            time.sleep(0.02)
        with rank.context.timed("nothing"):
            pass
        rank.file.close()
    (event,) = map(events.decode, (tmp_path / "0" / "events").read_bytes().splitlines())
    assert isinstance(event, events.Timed) and event.activity == "evaluation" and event.seconds >= 0.02
    assert (tmp_path / "1" / "events").read_bytes() == b""
