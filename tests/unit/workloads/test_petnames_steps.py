"""The steps of the pet-name workload, with known values: learning rate, loss, clipping, seeds of the dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim import AdamW

from ddptrain.errors import UsageError
from ddptrain.protocol import events
from ddptrain.workloads.petnames import train as workload
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from tests.unit.rank.ranks import Rank

NAMES = ["ada", "bo", "coco", "dina", "ella", "fido", "gus"]


class Constant(CharacterModel):
    """A model whose weights are 0: it finds each of the 31 symbols equally likely."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)


class Run:
    """A run of one rank in this process, and what was seen at each of its steps."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.seeds: list[int] = []
        self.logged: list[tuple[Any, ...]] = []
        self._rank = Rank(folder)
        self._names = folder / "names.txt"
        self._names.write_text("\n".join(NAMES))
        step = AdamW.step

        def seen(optimizer: AdamW, *args: Any) -> Any:
            (group,) = optimizer.param_groups
            self.rates.append(group["lr"])
            self.norms.append(math.sqrt(sum(float(one.grad.square().sum()) for one in group["params"])))
            self.seeds.append(torch.initial_seed())
            return step(optimizer, *args)

        monkeypatch.setattr(AdamW, "step", seen)

    def train(self, **params: Any) -> dict[str, list[float]]:
        """Train on the seven names, in batches of 4; the values that were logged or belong to checkpoints, by name."""
        small = {"hidden_size": 4, "layers": 1, "context": "full", "batch_size": 4, "val_fraction": 0.0, "epochs": 2}
        workload.train(self._rank.context, names=str(self._names), **{**small, **params})
        found: dict[str, list[float]] = {}
        for event in self._rank.events():
            if isinstance(event, events.Metrics):
                self.logged.append((*event.values, event.step, event.epoch))
                for name, value in event.values.items():
                    found.setdefault(name, []).append(value)
        return found

    def close(self) -> None:
        self._rank.file.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = Run(tmp_path, monkeypatch)
    yield made
    made.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447]),
        ("one_cycle", [0.04, 0.04 + 0.96 * 0.933013, 0.811745, 0.283058]),
    ],
)
def test_learning_rate_of_each_step(run: Run, schedule: str, shares: list[float]) -> None:
    """Two epochs of two steps: the rates after 0, 1/4, 1/2 and 3/4 of the run."""
    run.train(lr_schedule=schedule, learning_rate=0.02)
    assert run.rates == pytest.approx([0.02 * share for share in shares], rel=1e-5)


def test_losses_of_a_model_that_finds_all_symbols_equally_likely(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload, "CharacterModel", Constant)
    logged = run.train(learning_rate=1e-12, val_fraction=0.3)
    assert logged["train/loss"] == pytest.approx([math.log(31)] * 2, rel=1e-5)
    assert logged["val/loss"] == pytest.approx([math.log(31)] * 2, rel=1e-5)
    assert logged["samples"] == [5, 10], "2 of 7 names are held out"
    trained = ("train/loss", "samples", "samples_per_s")
    assert run.logged == [(*trained, 2, 1), ("val/loss", 2, 1), (*trained, 4, 2), ("val/loss", 4, 2)]
    out = capsys.readouterr().out
    assert "epoch 1/2: train/loss 3.4340, val/loss 3.4340, " in out and " names/s" in out
    assert "on 5 names, 2 steps an epoch over 1 rank" in out


def test_run_that_holds_out_no_names_has_no_validation(run: Run) -> None:
    assert "val/loss" not in run.train(epochs=1)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(run: Run) -> None:
    run.train(grad_clip=0.01)
    assert run.norms == pytest.approx([0.01] * 4, rel=1e-3)


def test_gradients_are_not_clipped_by_default(run: Run) -> None:
    run.train()
    assert min(run.norms) > 0.05


def test_dropout_has_a_seed_for_each_epoch(run: Run) -> None:
    run.train(seed=3)
    expected = [hash((3, epoch, 0)) % 2**64 for epoch in (1, 1, 2, 2)]
    assert run.seeds == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_training_begins_with_weights_of_the_same_architecture_and_no_others(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload, "weights_in", lambda inputs: inputs / "weights")
    context: Any = SimpleNamespace(inputs=tmp_path, device=torch.device("cpu"), rank=rank)
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    save_file(other.state_dict(), tmp_path / "weights")
    workload._begin_with_weights(context, cast(Any, model), "names@2")
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)
    assert capsys.readouterr().out == ("weights: names@2\n" if rank == 0 else "")
    before = model.weight.clone()
    for wrong, names in (
        ({"weight": torch.zeros(3, 2)}, "bias"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, "weight"),
        ({**other.state_dict(), "d": torch.zeros(1), "c": torch.zeros(1)}, "c, d"),
        ({"weight": torch.zeros(2, 3), "a": torch.zeros(1), "z": torch.zeros(1)}, "a, bias, weight"),
    ):
        save_file(wrong, tmp_path / "weights")
        with pytest.raises(UsageError) as refused:
            workload._begin_with_weights(context, cast(Any, model), "names@2")
        assert str(refused.value).startswith(
            f"params.weights: names@2 is of another architecture ({names} differ): set input, embedding_size"
        )
    assert torch.equal(model.weight, before)
