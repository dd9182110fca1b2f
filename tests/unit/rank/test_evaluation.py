"""What the ranks of an evaluation agree on, with one rank or with the values that other ranks would send."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from ddptrain.rank.checkpoint.files import write, write_state
from ddptrain.rank.checkpoint.snapshot import HostBuffers
from ddptrain.rank.evaluation import SavedCheckpoint, checked_metrics, evaluate

NAN = float("nan")


class Ranks:
    """The context of rank 0; `others` are the values that another rank sends to ctx.mean, by default the same."""

    rank = 0

    def __init__(self, *others: float) -> None:
        self.others = list(others)

    def mean(self, value: float, weight: float = 1.0) -> float:
        other = self.others.pop(0) if self.others else value
        return (value * weight + other * weight) / (2 * weight) if weight else NAN


@pytest.fixture
def scorers() -> Iterator[ModuleType]:
    """A module of the user with functions that evaluate."""
    module = ModuleType("own_scorers")

    def by_step(ctx: Any, checkpoint: SavedCheckpoint) -> dict[str, float]:
        checkpoint.notes.append("same data")
        return {"val/loss": float(checkpoint.step), "lost": NAN, "most": math.inf}

    def only_first(ctx: Any, checkpoint: SavedCheckpoint) -> dict[str, float]:
        if checkpoint.name != "new":
            raise RuntimeError("size mismatch\n  for weight")
        return {"val/loss": 1.0}

    def fails(ctx: Any, checkpoint: SavedCheckpoint) -> dict[str, float]:
        raise RuntimeError("no data")

    vars(module).update(by_step=by_step, only_first=only_first, fails=fails)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


TARGETS = [
    {"name": name, "folder": f"/{name}", "step": step, "epoch": 1.0, "metrics": {"val/loss": 2.0}}
    for name, step in (("new", 7), ("old", 3))
]


def run(function: str, *others: float) -> dict[str, Any]:
    return evaluate(cast("Any", Ranks(*others)), f"own_scorers:{function}", TARGETS, {"width": 3}, None)


def test_scores_of_all_checkpoints_are_returned_with_text_for_numbers_that_json_lacks(scorers: ModuleType) -> None:
    found = run("by_step")
    assert found["scores"] == {
        "new": {"val/loss": 7.0, "lost": "nan", "most": "inf"},
        "old": {"val/loss": 3.0, "lost": "nan", "most": "inf"},
    }
    assert found["notes"] == ["same data"] and found["failures"] == {}


def test_checkpoint_that_fails_has_a_reason_unless_it_is_the_first(
    scorers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("only_first")
    assert found["scores"] == {"new": {"val/loss": 1.0}}
    assert found["failures"] == {"old": "RuntimeError: size mismatch for weight"}
    assert "only_first" in capsys.readouterr().err  # the traceback
    with pytest.raises(RuntimeError, match="no data"):
        run("fails")


def test_checkpoint_that_failed_on_another_rank_only_has_no_scores(scorers: ModuleType) -> None:
    found = run("by_step", 7.0, 0.0, 1.0)  # equal values of the first checkpoint, then: the other rank has failed
    assert list(found["scores"]) == ["new"]
    assert found["failures"] == {"old": "it failed on another rank: see the logs of the ranks"}


def test_ranks_that_return_different_numbers_are_an_error(scorers: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"take the mean over all ranks, as ctx\.mean"):
        run("by_step", 9.0)
    assert run("by_step", 7.0 + 1e-4)["scores"]["new"]["val/loss"] == 7.0  # sums of GPUs differ a little


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned NoneType"),
        ({}, "a dict of numbers"),
        ({"val/loss": "good"}, r"'good' \(str\) for 'val/loss': a metric is one number"),
        ({"val/loss": torch.zeros(2)}, "a metric is one number"),
        ({" ": 1.0}, "a name is text"),
    ],
)
def test_values_that_are_no_metrics_are_refused(returned: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        checked_metrics(returned)


def test_saved_checkpoint_loads_weights_and_state_into_a_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    state = {"step": 7, "epoch": 1.0, "metrics": {}, "extra": {"classes": ["a", "b"]}}
    copied = HostBuffers().take(model, None, state)
    write(tmp_path / "step-7", copied)
    write_state(tmp_path / "step-7", copied.state)
    checkpoint = SavedCheckpoint("new", tmp_path / "step-7", 7, 1.0, {})
    assert torch.equal(checkpoint.weights()["weight"], model.weight)
    assert checkpoint.state()["extra"] == {"classes": ["a", "b"]}
    other = torch.nn.Linear(3, 1)
    checkpoint.load(other)
    assert torch.equal(other.weight, model.weight) and not other.training
    with pytest.raises(RuntimeError, match="size mismatch"):
        checkpoint.load(torch.nn.Linear(4, 1))
