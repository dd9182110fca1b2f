"""The trainer of the image workload in this process, with known values: where it goes on, its steps, what it leaves."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ddptrain.errors import UsageError
from ddptrain.rank.checkpoint.files import Resumed
from ddptrain.rank.context import PreemptedExit
from ddptrain.workloads.data_shards import EpochProgress
from ddptrain.workloads.images import train as workload
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.model.build_model import describe
from ddptrain.workloads.images.model.initial_weights import built_model
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.training_metrics import Meter
from ddptrain.workloads.images.validation import ValidationScore
from tests.unit.rank.test_context import Rank
from tests.unit.workloads.pictures import COLOURS, picture

CPU = torch.device("cpu")
TRAINING = "training small_cnn, 6 parameters, on 2 images, 7 steps an epoch over 3 ranks"
EACH = 4  # images of each colour: three train, one validates
MANIFEST = Manifest(
    url="/images",
    classes=("cat", "dog"),
    keys=("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"),
    labels=(0, 0, 1, 1),
    sizes=(-1,) * 4,
    versions=("",) * 4,
    train=(0, 2),
    val=(1, 3),
)


def bare_trainer(**fields: Any) -> Any:
    """A trainer that is not constructed, so that it has no loader and no model."""
    trainer: Any = workload.ImageTrainer.__new__(workload.ImageTrainer)
    trainer._ctx = SimpleNamespace(rank=1, world_size=3, device=CPU)
    trainer._settings = ImagesParams(architecture="small_cnn", image_size=16, epochs=4)
    trainer._manifest = MANIFEST
    trainer._model = nn.Linear(2, 2)
    for name, value in fields.items():
        setattr(trainer, name, value)
    return trainer


# --- Where it goes on ---


def resumed(**changes: Any) -> Resumed:
    data = {
        "model_config": describe("small_cnn", 8, MANIFEST.classes),
        "taken": [[2, 5], [3, 4]],
        "begun": 0.25,
    }
    return Resumed(**{"step": 17, "epoch": 2.75, "data": data, **changes})


def test_trainer_goes_on_at_the_share_of_an_epoch_with_its_own_sums() -> None:
    restored: list[Any] = []
    trainer = bare_trainer(_images_per_epoch=20, _meter=SimpleNamespace(restore=restored.append))
    trainer._resume_from(resumed(rank_state={"meter": "sums", "images": 54}))
    assert (trainer.epochs_done, trainer.step, trainer._images) == (2, 17, 54)
    assert trainer._part == EpochProgress([[2, 5]], 0.25, 4, is_resumed=True)
    assert restored == ["sums"]
    assert trainer._model_config == describe("small_cnn", 8, MANIFEST.classes) | {"image_size": 16}


def test_trainer_with_another_number_of_ranks_estimates_its_images() -> None:
    trainer = bare_trainer(_images_per_epoch=20, _meter=None)
    trainer._ctx.world_size = 4
    trainer._resume_from(resumed())
    assert (trainer.epochs_done, trainer.step, trainer._images) == (2, 17, 55)
    assert trainer._part == EpochProgress([[2, 5], [3, 4]], 0.75, 0, is_resumed=True)


@pytest.mark.parametrize(("epoch", "epochs_done", "images"), [(3.0, 3, 60), (None, 0, 0)])
def test_trainer_begins_an_epoch_where_a_checkpoint_has_no_part_of_one(
    epoch: float | None, epochs_done: int, images: int
) -> None:
    trainer = bare_trainer(_images_per_epoch=20, _meter=None)
    trainer._resume_from(resumed(epoch=epoch, data={"model_config": describe("small_cnn", 8, MANIFEST.classes)}))
    assert (trainer.epochs_done, trainer.step, trainer._images) == (epochs_done, 17, images)
    assert trainer._part == EpochProgress()


def test_checkpoint_of_other_classes_is_refused() -> None:
    data = {"model_config": describe("small_cnn", 8, ["cat", "dog", "pug"])}
    with pytest.raises(
        UsageError, match=r"is of 3 classes \(cat, dog, pug\), the images are of 2 classes \(cat, dog\)"
    ):
        bare_trainer(_images_per_epoch=20)._resume_from(resumed(data=data))


# --- Validation ---


@pytest.mark.parametrize("is_last", [True, False])
def test_last_validation_leaves_its_predictions(is_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, str] = {}
    calls: list[str] = []
    trainer = bare_trainer(
        _pixels="pixels", _outputs="outputs", _report="report", _check_bad=lambda: calls.append("bad")
    )
    trainer._model_config = describe("small_cnn", 8, MANIFEST.classes)
    trainer._ctx.save_file = lambda path, data: files.__setitem__(path, data.decode())
    trainer._feeder = SimpleNamespace(validate=lambda: "batches")

    def evaluate(*given: Any) -> ValidationScore:
        *others, keep, seen = given
        assert others == [trainer._model, "pixels", "batches", "outputs"] and seen == "report"
        assert (keep is not None) == is_last
        if keep is not None:
            keep(torch.tensor([3]), torch.tensor([1]), torch.tensor([0]), torch.tensor([0.75]))
        return ValidationScore(0.5, 0.25, 1.0, 8)

    monkeypatch.setattr(workload, "evaluate", evaluate)
    monkeypatch.setattr(workload, "share_buffers", lambda model: calls.append("buffers"))
    found = trainer._validate(is_last=is_last)
    assert found == {"val/loss": 0.5, "val/accuracy": 0.25, "val/top5": 1.0}
    assert calls == ["buffers", "bad"]
    table = "key,label,prediction,probability\ndog/2.png,dog,cat,0.75\n"
    assert files == ({"predictions/rank-1.csv": table} if is_last else {})


def test_validation_without_a_readable_image_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = bare_trainer(_pixels=None, _outputs=None, _report=None, _check_bad=lambda: None)
    trainer._feeder = SimpleNamespace(validate=list)
    monkeypatch.setattr(workload, "evaluate", lambda *_: ValidationScore(float("nan"), 0.0, 0.0, 0))
    monkeypatch.setattr(workload, "share_buffers", lambda model: None)
    assert trainer._validate(is_last=False) == {}
    trainer._manifest = dataclasses.replace(MANIFEST, val=())
    trainer._feeder = None
    assert trainer._validate(is_last=False) == {}


# --- One rank, from its beginning to its end ---


class Run:
    """A run of one rank in this process, and what it was told to log."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._n = folder, 0
        self._monkeypatch = monkeypatch
        self.logged: list[tuple[int, float, dict[str, float]]] = []
        self.tables: list[tuple[Any, ...]] = []
        self.pictures: list[tuple[int, list[int]]] = []
        self.saved: list[dict[str, Any]] = []
        self.logged_at_save: list[int] = []
        self.resumed: list[dict[str, type]] = []
        self.progressed: list[tuple[float, float, str]] = []
        self.files: dict[str, bytes] = {}
        keys = []
        for name in COLOURS:
            (folder / "images" / name).mkdir(parents=True)
            for number in range(EACH):
                (folder / "images" / name / f"{number}.png").write_bytes(picture(name, (12, 12)))
                keys.append(f"{name}/{number}.png")
        (folder / "inputs").mkdir()
        Manifest(
            url=str(folder / "images"),
            classes=tuple(COLOURS),
            keys=tuple(keys),
            labels=(0,) * EACH + (1,) * EACH + (2,) * EACH,
            sizes=(-1,) * 3 * EACH,
            versions=("",) * 3 * EACH,
            train=(0, 1, 2, 4, 5, 6, 8, 9, 10),
            val=(3, 7, 11),
        ).write(folder / "inputs")

    def train(self, preempt_at: int = 0, **params: Any) -> None:
        """Train on nine images in batches of 4: an epoch has three steps of 3. Preempt the run at a step."""
        self._n += 1
        folder = self._folder / f"rank-{self._n}"
        folder.mkdir()
        rank = Rank(folder, inputs=str(self._folder / "inputs"))
        ctx = rank.context

        def checkpoint(**what: Any) -> bool:
            self.saved.append(what)
            self.logged_at_save.append(len(self.logged))
            if what["step"] == preempt_at:
                raise PreemptedExit
            return True

        changes = {
            "log": lambda values, *, step, epoch: self.logged.append((step, epoch, values)),
            "log_table": lambda name, columns, rows, *, step: self.tables.append((name, columns, rows, step)),
            "log_image": lambda name, image, *, step, caption: self.pictures.append((step, list(image.shape))),
            "save_file": self.files.__setitem__,
            "progress": lambda done, total, *, unit: self.progressed.append((done, total, unit)),
            "checkpoint": checkpoint,
            "resume": lambda **into: self.resumed.append({name: type(into[name]) for name in into}),
        }
        for name, stub in changes.items():
            self._monkeypatch.setattr(ctx, name, stub)
        small = {
            "source": str(self._folder / "images"),
            "architecture": "small_cnn",
            "image_size": 8,
            "batch_size": 4,
            "loader_workers": 0,
            "epochs": 2,
            "augmentation": "none",
            "base_lr": 0.01,
        }
        try:
            workload.train(ctx, **{**small, **params})
        finally:
            ctx.close()
            rank.file.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Run(tmp_path, monkeypatch)
    dist.destroy_process_group()


def test_run_of_two_epochs_logs_saves_and_tells_what_it_does(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.train(examples_every=2, scheduler="cosine", optimizer="sgd")
    steps = [(step, epoch) for step, epoch, values in run.logged if "train/loss" in values]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert [epoch for _, epoch in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    rates = [values["train/learning_rate"] for _, _, values in run.logged if "train/loss" in values]
    assert rates == sorted(rates, reverse=True) and rates[0] == 0.01
    epochs = [(step, epoch, values) for step, epoch, values in run.logged if "samples" in values]
    assert [(step, epoch, values["samples"]) for step, epoch, values in epochs] == [(3, 1, 9), (6, 2, 18)]
    names = {"train/accuracy", "val/loss", "val/accuracy", "val/top5", "samples", "samples_per_s"}
    assert all(set(values) == names and values["samples_per_s"] > 0 for *_, values in epochs)

    assert [(one["step"], one["last"]) for one in run.saved] == [
        *[(step, False) for step in (1, 2, 3, 4, 5)],
        (6, True),
    ]
    assert [one["epoch"] for one in run.saved] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    assert [one["taken"] for one in run.saved] == [[[1, 1]], [[1, 2]], [], [[1, 1]], [[1, 2]], []]
    assert [one["rank_state"]["images"] for one in run.saved] == [3, 6, 9, 12, 15, 18]
    assert [one["rank_state"]["meter"]["n"] for one in run.saved] == [3, 6, 9, 3, 6, 9]
    objects = {"model": DistributedDataParallel, "optimizer": torch.optim.SGD}
    assert {name: type(run.saved[0][name]) for name in objects} == objects and run.resumed == [objects]
    assert run.saved[0]["metrics"] == {} and run.saved[0]["begun"] == 0.0
    assert set(run.saved[-1]["metrics"]) == {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "val/top5"}
    assert run.saved[-1]["model_config"]["classes"] == ["blue", "green", "red"]

    assert {total for _, total, _ in run.progressed} == {18} and run.progressed[-1:] == [(18, 18, "images")]
    assert len(run.progressed) == 6 + 2, "each step, and the batch of each validation"
    assert run.pictures == [(step, [3, 8, 24]) for step in (2, 4, 6)]
    ((name, columns, rows, step),) = run.tables
    assert (name, columns, len(rows), step) == ("train_predictions", ("image", "label", "prediction", "score"), 3, 6)
    table = list(csv.DictReader(run.files["predictions/rank-0.csv"].decode().splitlines()))
    assert [row["key"] for row in table] == ["blue/3.png", "green/3.png", "red/3.png"]

    out = capsys.readouterr().out
    assert "training small_cnn, 23,891 parameters, on 9 images, 3 steps an epoch over 1 rank\n" in out
    assert "epoch 1/2: train/loss " in out and " images/s\n" in out and "all 2 epochs are done" not in out


def test_pictures_are_left_out_on_request(run: Run) -> None:
    run.train(examples_every=0, epochs=1)
    assert run.pictures == []


def test_preempted_run_logs_the_steps_before_its_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Meter.__init__

    def rarely(self: Any, ctx: Any) -> None:
        made(self, ctx)
        self._most_waiting = 100

    monkeypatch.setattr(Meter, "__init__", rarely)
    with pytest.raises(PreemptedExit):
        run.train(preempt_at=2)
    assert [step for step, *_ in run.logged] == [1, 2] and run.logged_at_save == [0, 1]


def test_weights_at_the_start_depend_on_the_seed_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def begin(ctx: Any, settings: ImagesParams, model: nn.Module, config: dict[str, Any]) -> None:
        begun.append((settings.seed, config["classes"]))
        torch.manual_seed(3)
        twin = built_model(config).state_dict()
        assert all(torch.equal(value, twin[name]) for name, value in model.state_dict().items())

    monkeypatch.setattr(workload, "begin_with_weights", begin)
    torch.manual_seed(8)
    run.train(epochs=1, seed=3)
    assert begun == [(3, ["blue", "green", "red"])]


def test_rates_are_of_the_images_of_the_epoch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 104.5])
    monkeypatch.setattr(workload, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    run.train(epochs=1)
    assert [values["samples_per_s"] for *_, values in run.logged if "samples_per_s" in values] == [2.0]
    assert {float(state["step"]) for state in run.saved[-1]["optimizer"].state.values()} == {3.0}


def test_gradients_of_a_step_of_several_passes_are_averaged_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.train(epochs=1, batch_size=9)
    whole = run.saved[-1]
    parts: list[int] = []
    forward = workload.ImageTrainer._forward

    def counting(self: Any, raw: torch.Tensor, labels: torch.Tensor) -> Any:
        parts.append(len(labels))
        return forward(self, raw, labels)

    unsynced: list[int] = []
    monkeypatch.setattr(workload.ImageTrainer, "_forward", counting)
    no_sync = DistributedDataParallel.no_sync

    def unsynchronised(model: DistributedDataParallel) -> Any:
        unsynced.append(1)
        return no_sync(model)

    monkeypatch.setattr(DistributedDataParallel, "no_sync", unsynchronised)
    monkeypatch.setattr("ddptrain.rank.context.RankContext.accumulate", property(lambda self: 3))
    run.train(epochs=1, batch_size=3)
    assert parts == [3, 3, 3] and len(unsynced) == 2 and [one["step"] for one in run.saved] == [1, 1]
    assert whole["rank_state"]["images"] == run.saved[-1]["rank_state"]["images"] == 9


def test_run_without_a_list_of_images_is_an_error() -> None:
    with pytest.raises(UsageError, match="there is no list of images"):
        workload.train(SimpleNamespace(inputs=None))  # type: ignore[arg-type]


# --- Preparation ---


class Watched(nn.Module):
    """A network that remembers the shape and the format of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.seen: list[tuple[list[int], bool]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append((list(images.shape), images.is_contiguous()))
        scores: torch.Tensor = self.layers(images)
        return scores


@pytest.mark.parametrize("channels_last", [True, False])
def test_first_pass_of_a_model_changes_nothing_in_it(channels_last: bool) -> None:
    given: list[dict[str, Any]] = []
    model = Watched()
    if channels_last:
        model.to(memory_format=torch.channels_last)

    def prepare(model: nn.Module, **options: Any) -> nn.Module:
        given.append(options)
        return model

    ctx: Any = SimpleNamespace(device=CPU, prepare=prepare)
    settings = ImagesParams(architecture="small_cnn", image_size=9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert workload._distributed(ctx, settings, model, 5) is model
    assert given == [
        {
            "accumulate": 1,
            "gradient_as_bucket_view": True,
            workload._SYNC_BUFFERS: False,
        }
    ]
    assert model.seen == [([2, 3, 9, 9], not channels_last)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- Parts of a step ---


@pytest.mark.parametrize(("n_counted", "weight"), [(3, 0.6), (1, 0.6), (0, 0.0)])
def test_weight_of_a_step_makes_the_mean_over_the_images_of_all_ranks(n_counted: int, weight: float) -> None:
    batch: Any = SimpleNamespace(total=5, n_counted=n_counted)
    assert bare_trainer()._weight(batch) == weight


@pytest.mark.parametrize(("is_last", "most"), [(True, 334), (False, None)])
def test_table_of_training_images_is_divided_among_the_ranks(is_last: bool, most: int | None) -> None:
    trainer = bare_trainer(_model_config=describe("small_cnn", 8, MANIFEST.classes))
    table = trainer._training_table(is_last=is_last)
    assert (table and table._left) == most


@pytest.mark.parametrize(("needs_two", "n", "seen"), [(True, 1, 2), (True, 2, 2), (False, 1, 1)])
def test_single_image_is_shown_twice_where_batch_norm_needs_two(needs_two: bool, n: int, seen: int) -> None:
    shown: list[int] = []

    def model(images: torch.Tensor) -> torch.Tensor:
        shown.append(len(images))
        return images.flatten(1)

    trainer = bare_trainer(_needs_two=needs_two, _pixels=lambda raw: raw.float(), _outputs=torch.tensor([1, 0]))
    object.__setattr__(trainer, "_model", model)
    loss, logits = trainer._forward(torch.zeros(n, 2), torch.zeros(n, dtype=torch.int64))
    assert shown == [seen] and logits.shape == (n, 2)
    assert loss.item() == pytest.approx(n * 0.693147)


@pytest.mark.parametrize(
    ("rank", "step", "epochs_done", "lines"),
    [
        (0, 0, 0, [TRAINING]),
        (
            0,
            9,
            4,
            [
                f"{TRAINING}, continuing after epoch 4, step 9",
                "all 4 epochs are done: raise params.epochs to continue training",
            ],
        ),
        (1, 9, 4, []),
    ],
)
def test_rank_0_tells_what_is_trained(
    rank: int, step: int, epochs_done: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = bare_trainer(step=step, epochs_done=epochs_done, steps_per_epoch=7)
    trainer._ctx.rank = rank
    trainer.greet()
    assert capsys.readouterr().out.splitlines() == lines


def test_classes_of_a_checkpoint_are_named_up_to_three() -> None:
    assert workload._some(["a", "b", "c"]) == "3 classes (a, b, c)"
    assert workload._some(["a", "b", "c", "d"]) == "4 classes (a, b, c and 1 more)"
    assert workload._some(["x" * 50]) == f"1 class ({'x' * 37}...)"
