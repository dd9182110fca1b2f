"""What comes back from a checkpoint: the extra state on the device, and the states of this rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.rank.checkpoint import checkpoint_reader, file_format, random_state
from ddptrain.rank.checkpoint.checkpoint_reader import Resumed
from tests.unit.specs import make_spec

CPU = torch.device("cpu")


class Part:
    """An object that is resumed."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def load_state_dict(self, state: Any) -> None:
        self.found.append(state)


class Bench:
    """Loads a state of the test; `notes` are for the user, `random` is what is done with random states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.random: list[tuple[Any, ...]] = []
        self.read: list[tuple[Any, ...]] = []
        self.state: dict[str, Any] = {"step": 3, "epoch": 1.5, "extra": {}}
        monkeypatch.setattr(file_format, "read", self._read)
        monkeypatch.setattr(random_state, "restore", lambda *given: self.random.append(("restore", *given)))
        monkeypatch.setattr(random_state, "reseed", lambda *given: self.random.append(("reseed", *given)))

    def _read(self, *given: Any) -> dict[str, Any]:
        self.read.append(given)
        return self.state

    def load(self, *, rank: int = 0, world_size: int = 2, **more: Any) -> Resumed:
        spec = make_spec(rank=rank, world_size=world_size, resume_from="/runs/r/step-3")
        model: Any = "model"
        resumed, state = checkpoint_reader.load_checkpoint(spec, CPU, model, None, more, self.notes.append)
        assert state is self.state
        return resumed


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def ranks(*states: Any) -> list[Any]:
    return [state and {"random": state, "rank_state": f"of {state}"} for state in states]


def test_objects_get_their_state_and_the_rest_is_data(bench: Bench) -> None:
    bench.state["extra"] = {"scheduler": {"last": 4}, "seen": 12}
    scheduler, sampler = Part(), Part()
    resumed = bench.load(scheduler=scheduler, sampler=sampler)
    assert scheduler.found == [{"last": 4}] and sampler.found == []
    assert bench.notes == ["the checkpoint of step 3 contains no 'sampler': it starts from the beginning"]
    assert (resumed.step, resumed.epoch, resumed.data, resumed.rank_state) == (3, 1.5, {"seen": 12}, None)
    assert bench.read == [(Path("/runs/r/step-3"), "model", None, CPU)]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_gets_its_own_states_from_as_many_ranks(bench: Bench, rank: int) -> None:
    bench.state["ranks"] = ranks("a", "b")
    resumed = bench.load(rank=rank)
    own = "ab"[rank]
    assert (resumed.rank_state, resumed.world_size) == (f"of {own}", 2)
    assert bench.random == [("restore", own, CPU)] and bench.notes == []


def test_other_number_of_ranks_has_new_random_states(bench: Bench) -> None:
    bench.state["ranks"] = ranks("a", "b", "c")
    resumed = bench.load(rank=1)
    assert (resumed.rank_state, resumed.world_size, bench.random) == (None, 3, [("reseed", "a", 1)])
    assert bench.notes == [
        "the checkpoint is of 3 ranks, this run has 2: it continues where they were, with new random states"
    ]


def test_rank_whose_state_was_not_saved_has_a_new_one(bench: Bench) -> None:
    bench.state["ranks"] = ranks("a", None)
    assert bench.load(rank=1).rank_state is None and bench.random == [("reseed", "a", 1)]
    assert bench.notes == ["the checkpoint lacks the random states of some ranks: those are new"]


@pytest.mark.parametrize("saved", [{}, {"ranks": None}, {"ranks": []}])
def test_checkpoint_without_states_of_ranks_changes_none(bench: Bench, saved: dict[str, Any]) -> None:
    bench.state |= saved
    assert bench.load(world_size=4).world_size == 4
    assert bench.random == [] and bench.notes == []


class OnDevice:
    """A tensor that notes where it is moved."""

    def to(self, device: torch.device) -> str:
        return f"on {device}"
