"""The trainer of the image workload in this process, with known values: where it goes on, its steps, what it leaves."""

from __future__ import annotations

import csv
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ddptrain.errors import UsageError
from ddptrain.rank.context import PreemptedExit, RankContext, Resumed
from ddptrain.workloads.images import train as workload
from ddptrain.workloads.images.model import describe
from tests.unit.rank.ranks import Rank
from tests.unit.workloads.images_runs import make_manifest
from tests.unit.workloads.pictures import COLOURS, picture

EACH = 4  # images of each colour: three train, one validates


# --- One rank, from its beginning to its end ---


class Watched:
    """The context of a rank, some of whose methods only record what they are given."""

    def __init__(self, ctx: RankContext, **methods: Any) -> None:
        self.__dict__.update(methods)
        self.ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class Run:
    """A run of one rank in this process, and what it was told to log."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._n = folder, 0
        self.checkpoint: Resumed | None = None
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
        make_manifest(str(folder / "images"), list(COLOURS), keys, val=(3, 7, 11)).write(folder / "inputs")

    def train(self, preempt_at: int = 0, **params: Any) -> None:
        """Train on nine images in batches of 4: an epoch has three steps of 3. Preempt the run at a step."""
        self._n += 1
        folder = self._folder / f"rank-{self._n}"
        folder.mkdir()
        rank = Rank(folder, inputs=str(self._folder / "inputs"))

        def checkpoint(**what: Any) -> bool:
            self.saved.append(what)
            self.logged_at_save.append(len(self.logged))
            if what["step"] == preempt_at:
                raise PreemptedExit
            return True

        def resume(**into: Any) -> Resumed | None:
            self.resumed.append({name: type(into[name]) for name in into})
            return self.checkpoint

        methods = {
            "log": lambda values, *, step, epoch: self.logged.append((step, epoch, values)),
            "log_table": lambda name, columns, rows, *, step: self.tables.append((name, columns, rows, step)),
            "log_image": lambda name, image, *, step, caption: self.pictures.append((step, list(image.shape))),
            "save_file": self.files.__setitem__,
            "progress": lambda done, total, *, unit: self.progressed.append((done, total, unit)),
            "checkpoint": checkpoint,
            "preempted": bool(preempt_at),
            "resume": resume,
        }
        ctx: Any = Watched(rank.context, **methods)
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
            rank.context.close()
            rank.file.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    run = Run(tmp_path)
    yield run
    dist.destroy_process_group()
    run.saved.clear()  # the scheduler refers to the loader, whose threads end with it
    gc.collect()


def test_run_of_two_epochs_logs_saves_and_tells_what_it_does(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.train(scheduler="cosine", optimizer="sgd")
    steps = [(step, epoch) for step, epoch, values in run.logged if "train/loss" in values]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert [epoch for _, epoch in steps] == pytest.approx([4 / 9, 8 / 9, 1, 13 / 9, 17 / 9, 2])
    rates = [values["train/learning_rate"] for _, _, values in run.logged if "train/loss" in values]
    assert rates == sorted(rates, reverse=True) and rates[0] == 0.01
    epochs = [(step, epoch, values) for step, epoch, values in run.logged if "samples" in values]
    assert [(step, epoch, values["samples"]) for step, epoch, values in epochs] == [(3, 1, 9), (6, 2, 18)]
    names = {"train/accuracy", "val/loss", "val/accuracy", "val/top5", "samples", "samples_per_s"}
    assert all(set(values) == names and values["samples_per_s"] > 0 for *_, values in epochs)

    assert [(one["step"], one.get("last", False)) for one in run.saved] == [
        *[(step, False) for step in (1, 2, 3, 4, 5)],
        (6, True),
    ]
    assert [one["epoch"] for one in run.saved] == pytest.approx([4 / 9, 8 / 9, 1, 13 / 9, 17 / 9, 2])
    objects = {"model": DistributedDataParallel, "optimizer": torch.optim.SGD}
    assert {name: type(run.saved[0][name]) for name in objects} == objects and run.resumed == [objects]
    assert set(run.saved[-1]["metrics"]) == {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "val/top5"}
    assert run.saved[-1]["model_config"]["classes"] == ["blue", "green", "red"]

    assert {total for _, total, _ in run.progressed} == {18} and run.progressed[-1:] == [(18, 18, "images")]
    assert len(run.progressed) == 6 + 2, "each step, and the batch of each validation"
    assert run.pictures == [(step, [3, 8, 32]) for step in (1, 4)]
    (name, columns, rows, step), (mistakes, *_) = run.tables
    assert mistakes == "val_mistakes"
    assert (name, columns, len(rows), step) == ("train_predictions", ("image", "label", "prediction", "score"), 4, 6)
    table = list(csv.DictReader(run.files["predictions/rank-0.csv"].decode().splitlines()))
    assert [row["key"] for row in table] == ["blue/3.png", "green/3.png", "red/3.png"]

    out = capsys.readouterr().out
    assert "training small_cnn, 23,891 parameters, on 9 images, 3 steps an epoch over 1 rank\n" in out
    assert "epoch 1/2: train/loss " in out and " images/s\n" in out and "all 2 epochs are done" not in out


def test_weights_at_the_start_depend_on_the_seed_alone(run: Run) -> None:
    weights = []
    for others, seed in ((8, 3), (9, 3), (8, 4)):
        torch.manual_seed(others)
        run.train(epochs=1, seed=seed, base_lr=1e-12)
        weights.append(run.saved[-1]["model"].state_dict())
    first, same, other = ({name: w for name, w in each.items() if w.dim() > 1} for each in weights)
    assert all(torch.allclose(first[name], same[name]) for name in first)
    assert not all(torch.allclose(first[name], other[name]) for name in first)


def test_checkpoint_of_other_classes_is_refused(run: Run) -> None:
    data = {"model_config": describe("small_cnn", 8, ["cat", "dog"])}
    run.checkpoint = Resumed(step=17, epoch=2.75, data=data)
    with pytest.raises(
        UsageError, match=r"is of 2 classes \(cat, dog\), the images are of 3 classes \(blue, green, red"
    ):
        run.train()


def test_single_image_is_trained_on_where_batch_norm_needs_two(run: Run) -> None:
    run.train(architecture="resnet18", image_size=32, batch_size=1, epochs=1)
    assert run.saved[-1]["step"] == 9


# --- Preparation ---
