"""The events and staged files that a workload's calls produce."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddptrain.protocol import events
from ddptrain.rank.checkpoint.checkpoint_writer import done_key
from ddptrain.rank.checkpoint.coordination import WorkerGroupStore
from ddptrain.rank.context import PreemptedExit, RankContext
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.model import prepare
from tests.unit.notes import Notes
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
    WorkerGroupStore(spec).set(done_key(1), "")
    note, event = rank.events()
    assert isinstance(note, events.Note) and "rank 1 did not call ctx.checkpoint" in note.message
    assert isinstance(event, events.CheckpointSaved)
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


def test_workload_ends_early_if_it_has_read_preempted_and_not_saved_its_last_step(rank: Rank) -> None:
    calls, model = rank.context._calls, torch.nn.Linear(1, 1)
    found = [(rank.context.preempted, calls.ends_early, calls.has_saved)]
    calls.tell_to_end()
    found += [(calls.told_to_end, calls.ends_early, calls.has_saved)]  # it has not read ctx.preempted again
    found += [(rank.context.preempted, calls.ends_early, calls.has_saved)]
    rank.context.checkpoint(model=model, step=3, last=True)
    found += [(rank.context.preempted, calls.ends_early, calls.has_saved)]
    assert found == [(False, False, False), (True, False, False), (True, True, False), (True, False, True)]
    with pytest.raises(PreemptedExit):
        rank.context.checkpoint(model=model, step=4)
    assert calls.ends_early


def test_step_of_a_checkpoint_is_whole(rank: Rank) -> None:
    for step, text in ((1.5, "step must be a whole number, not 1.5"), (None, "'step' is None"), ("3", "'step' is '3'")):
        with pytest.raises(TypeError, match=text):
            rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=step)  # type: ignore[arg-type]
    assert rank.events() == []


def test_resumed_run_has_a_checkpoint(tmp_path: Path) -> None:
    rank = Rank(tmp_path, resume_from="somewhere")
    assert rank.context._calls.has_saved
    rank.file.close()


def test_epochs_are_counted_from_1_and_set_in_each_loader(rank: Rank) -> None:
    assert list(rank.context.epochs(3)) == [1, 2, 3] and list(rank.context.epochs(0)) == []
    loaders = [rank.context.loader(range(4), batch_size=2) for _ in range(2)]  # type: ignore[arg-type]
    seen = [[loader.epoch for loader in loaders] for _ in rank.context.epochs(2)]
    assert seen == [[1, 1], [2, 2]]


@pytest.mark.parametrize("number", [0, 1])
def test_rank_0_executes_the_block_before_the_others_begin_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Calls:
        def enter(self, name: str) -> int:
            done.append(f"enter {name}")
            return 7

        def meet(self, name: str, number: int, store: object) -> None:
            assert store is made.context._store
            done.append((name, number))

    made = Rank(tmp_path, rank=number, world_size=2)
    monkeypatch.setattr(made.context, "_collective_calls", Calls())
    with made.context.rank_zero_first():
        done.append("block")
    made.file.close()
    meeting = ("rank_zero_first", 7)
    assert done == ["enter rank_zero_first", *(("block", meeting) if number == 0 else (meeting, "block"))]


# --- what is passed on ---


def test_prepare_fills_up_its_arguments_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, world_size=8, hosts=2, local_world_size=4, prepare={"precision": "bf16", "accumulate": 2})
    notes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank.context, "_tracked", Notes(notes, "trackers"))
    monkeypatch.setattr(rank.context, "_gradients", Notes(notes, "gradients"))
    rank.context._collective_calls._thread = SimpleNamespace()  # type: ignore[assignment]

    def prepare_model(model: Any, *given: Any, **ddp: Any) -> str:
        wait = rank.context._collective_calls.wait
        assert wait is not None and wait.name == "prepare"
        notes.append((model, *given, ddp))
        return "prepared"

    monkeypatch.setattr(prepare, "prepare_model", prepare_model)
    model: Any = "model"
    options = {"precision": "fp32", "strategy": "fsdp", "shard": ["Block"], "activation_checkpointing": []}
    assert rank.context.prepare(model, **options, find_unused_parameters=True) == "prepared"  # type: ignore[arg-type, comparison-overlap]
    settings = {"accumulate": 2, **options, "hosts": 2, "ranks_on_host": 4}
    made = ("model", torch.device("cpu"), settings, rank.context._use_compile_cache, {"find_unused_parameters": True})
    used, tracked = ("gradients.use", "fp32", 2), ("trackers.model", "model")
    assert notes == [used, tracked, made, ("gradients.attach", "prepared")]
    assert rank.context._collective_calls.counts == {"prepare": 1}
    notes.clear()
    rank.context.prepare(model, compile=True, channels_last=False, accumulate=3)
    assert notes[0] == ("gradients.use", "bf16", 3)
    assert {name: notes[2][2][name] for name in ("compile", "channels_last")} == {
        "compile": True,
        "channels_last": False,
    }
    rank.file.close()


def test_other_ranks_tell_nothing(tmp_path: Path) -> None:
    rank = Rank(tmp_path, rank=1)
    rank.context._note("not kept")
    assert (tmp_path / "events").read_bytes() == b""
    rank.file.close()


def test_images_and_tables_have_whole_steps(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank.context, "_media", Notes(notes, "media"))
    rank.context.log_image("worst", "image", step=3.0, caption="a cat")  # type: ignore[arg-type]
    rank.context.log_image("worst", "image")
    rank.context.log_table("t", ["a"], [[1]], step=4)
    rank.context.log_table("t", ["a"], [[1]])
    assert notes == [
        ("media.image", "worst", "image", 3, "a cat"),
        ("media.image", "worst", "image", None, ""),
        ("media.table", "t", ["a"], [[1]], 4),
        ("media.table", "t", ["a"], [[1]], None),
    ]
    with pytest.raises(TypeError, match=r"step must be a whole number, not 0\.5"):
        rank.context.log_image("worst", "image", step=0.5)  # type: ignore[arg-type]


def test_values_of_all_ranks_are_asked_for_with_their_weights(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank.context, "_collective_values", Notes(notes, "all", mean=lambda *_: 0.5))
    assert rank.context.mean(3.0) == rank.context.mean(3.0, weight=2.0) == 0.5
    rank.context.all_finite(1.0)
    assert notes == [("all.mean", 3.0, 1.0), ("all.mean", 3.0, 2.0), ("all.all_finite", 1.0)]


def test_only_reported_steps_end_a_step_of_the_profile(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(rank.context, "_profiler", SimpleNamespace(reported=steps.append, is_over=False))
    rank.context.log({"loss": 1.0}, step=3)
    rank.context.log({"loss": 1.0})
    rank.context.progress(4, unit="steps")
    rank.context.progress(500)
    rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=5, epoch=0.5)
    rank.context.resume(model=torch.nn.Linear(1, 1))
    assert steps == [3, 4, 5, 0]
    rank.context._profiler = None
    rank.events()


@pytest.mark.parametrize(
    ("number", "gathers", "writes", "waits"),
    [(0, False, False, False), (0, True, True, True), (1, False, False, True), (1, False, True, False)],
)
def test_rank_waits_for_others_and_not_for_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, gathers: bool, writes: bool, waits: bool
) -> None:
    rank = Rank(tmp_path, rank=number)
    monkeypatch.setattr(rank.context, "_writer", SimpleNamespace(waits_for_ranks=gathers, is_writing=writes))
    assert rank.context._waits_for_others() is waits
    rank.file.close()


def test_epochs_go_on_after_those_of_the_checkpoint(rank: Rank, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    rank.context.checkpoint(model=model, step=3, epoch=2.5, last=True)
    rank.context.checkpoint(model=model, step=4, epoch=3)
    rank.context.close()
    for number, epochs in ((0, [3, 4]), (1, [4])):
        folder = tmp_path / str(number)
        folder.mkdir()
        resumed = Rank(folder, resume_from=str(rank.folder / "staging" / f"checkpoint-{number}"))
        found = resumed.context.resume(model=model)
        assert found is not None and found.world_size == 1
        assert list(resumed.context.epochs(4)) == epochs and resumed.context._known_step == number + 3
        resumed.file.close()


@pytest.mark.parametrize(("failed", "done"), [(False, True), (True, False)])
def test_rank_that_has_returned_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool, done: bool
) -> None:
    rank = Rank(tmp_path, rank=1)
    notes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank.context, "_writer", Notes(notes, "saver", wait=lambda *_: True))
    monkeypatch.setattr(rank.context, "_store", Notes(notes, "store"))
    assert rank.context.close(3.0, failed=failed)
    waited = ("saver.wait", 3.0, {"hurry": failed})
    assert notes == [waited, *([("store.set", "done/1", "")] if done else [])]
    rank.file.close()
