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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddptrain.errors import UsageError
from ddptrain.protocol import events
from ddptrain.rank.checkpoint.files import Resumed
from ddptrain.workloads.data_shards import EpochProgress
from ddptrain.workloads.petnames import train as workload
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from tests.unit.rank.test_context import Rank

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


def test_rate_of_an_epoch_is_of_its_own_names(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 10.0, 14.0])
    monkeypatch.setattr(workload, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert run.train()["samples_per_s"] == [3.5, 1.75]


def test_checkpoints_have_the_part_of_the_epoch_that_is_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[dict[str, Any]] = []
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run._rank.context, "checkpoint", lambda **what: saved.append(what))
    monkeypatch.setattr(workload, "log_generated_names", lambda ctx, model, *given: written.append(given))
    monkeypatch.setattr(workload, "CharacterModel", Constant)
    run.train(batch_size=2, val_fraction=0.3, seed=5, learning_rate=1e-12)
    assert [(one["step"], one["epoch"], one["last"]) for one in saved] == [
        *((1, pytest.approx(1 / 3), False), (2, pytest.approx(2 / 3), False), (3, 1, False)),
        *((4, pytest.approx(4 / 3), False), (5, pytest.approx(5 / 3), False), (6, 2, True)),
    ]
    assert [one["taken"] for one in saved] == [[[1, 1]], [[1, 2]], [], [[1, 1]], [[1, 2]], []]
    assert [one["rank_state"]["samples"] for one in saved] == [2, 3, 5, 7, 9, 10]
    assert [set(one["metrics"]) for one in saved] == [set(), set(), {"train/loss", "val/loss"}] * 2
    assert saved[2]["metrics"]["train/loss"] == pytest.approx(math.log(31))
    assert saved[-1]["model_config"]["hidden_size"] == 4 and saved[0]["begun"] == 0.0
    assert {type(saved[0][name]) for name in ("model", "optimizer")} == {DistributedDataParallel, AdamW}
    assert [one["rank_state"]["n_targets"] for one in [*saved[:3], saved[-1]]] == [9, 14, 21, 21]
    assert written == [({*NAMES}, 16, 5, 6)]


def test_run_begins_with_the_weights_that_are_named_and_reports_its_progress(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def begin(ctx: Any, model: CharacterModel, name: str) -> None:
        begun.append((ctx, name))
        torch.manual_seed(3)
        twin = CharacterModel(model.config).state_dict()
        assert all(torch.equal(value, twin[name]) for name, value in model.state_dict().items())

    progressed: list[tuple[float, float, str]] = []
    context = run._rank.context
    monkeypatch.setattr(workload, "_begin_with_weights", begin)
    monkeypatch.setattr(context, "progress", lambda done, total, *, unit: progressed.append((done, total, unit)))
    loaded: list[dict[str, Any]] = []
    monkeypatch.setattr(context, "resume", lambda **into: loaded.append({name: type(into[name]) for name in into}))
    run.train(weights="model:pets@1", val_fraction=0.3, seed=3)
    assert loaded == [{"model": CharacterModel, "optimizer": AdamW}]
    assert begun == [(context, "model:pets@1")]
    # Two steps, then a validation, in each of two epochs.
    assert [done for done, _, _ in progressed] == [3, 5, 5, 8, 10, 10]
    assert {(total, unit) for _, total, unit in progressed} == {(10, "names")}


def test_run_that_holds_out_no_names_has_no_validation(run: Run) -> None:
    assert "val/loss" not in run.train(epochs=1)


def going_on(world_size: int, **checkpoint: Any) -> Any:
    """A trainer of two epochs that were done, and of what a checkpoint has of the third."""
    trainer: Any = workload.NamesTrainer.__new__(workload.NamesTrainer)
    trainer._ctx = SimpleNamespace(world_size=world_size, device=torch.device("cpu"))
    trainer.epochs_done, trainer.rows_per_epoch, trainer.samples = 2, 20, 40
    trainer._loss_sum, trainer.n_targets = torch.zeros(()), 0
    data = {"taken": [[2, 5], [3, 4]], "begun": 0.25}
    trainer._resume_from(Resumed(**{"step": 17, "epoch": 2.75, "data": data, **checkpoint}))
    return trainer


def test_trainer_goes_on_at_the_share_of_an_epoch_with_its_own_sums() -> None:
    state = {"loss_sum": torch.tensor(3.5), "n_targets": 11, "samples": 54}
    trainer = going_on(3, rank_state=state)
    assert (float(trainer._loss_sum), trainer.n_targets, trainer.samples) == (3.5, 11, 54)
    assert trainer._part == EpochProgress([[2, 5]], 0.25, 4, is_resumed=True)


def test_trainer_with_another_number_of_ranks_estimates_its_samples() -> None:
    trainer = going_on(4)
    assert (float(trainer._loss_sum), trainer.n_targets, trainer.samples) == (0.0, 0, 55)
    assert trainer._part == EpochProgress([[2, 5], [3, 4]], 0.75, 0, is_resumed=True)
    whole = going_on(4, epoch=2.0, data={})
    assert whole.samples == 40 and whole._part == EpochProgress()


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


@pytest.mark.parametrize(
    ("rank", "step", "line"),
    [
        (0, 0, "training 9 parameters on 5 names, 2 steps an epoch over 1 rank\n"),
        (0, 7, "training 9 parameters on 5 names, 2 steps an epoch over 1 rank, continuing after epoch 3, step 7\n"),
        (1, 7, ""),
    ],
)
def test_rank_0_tells_what_is_trained(rank: int, step: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = SimpleNamespace(unit="names", steps_per_epoch=2, epochs_done=3, step=step)
    context = SimpleNamespace(rank=rank, world_size=1)
    workload._greet(cast(Any, context), cast(Any, nn.Linear(2, 3)), cast(Any, [0] * 5), cast(Any, trainer))
    assert capsys.readouterr().out == line
