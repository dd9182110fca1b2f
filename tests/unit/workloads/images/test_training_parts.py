"""The optimizer, metrics and tables of an image training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim.lr_scheduler import OneCycleLR

from ddptrain.workloads.images import prediction_tables
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.prediction_tables import PredictionTable, TrainingTable
from ddptrain.workloads.images.train import Meter, Schedule, make_optimizer

# --- The learning rate over a run ---


def made(**params: Any) -> tuple[ImagesParams, torch.optim.Optimizer, Schedule]:
    settings = ImagesParams(**params)
    optimizer = make_optimizer(settings, nn.Linear(2, 1).parameters())
    return settings, optimizer, Schedule(settings, optimizer)


def rates(schedule: Schedule, epochs: int, steps: int) -> list[float]:
    found = []
    for step in range(epochs * steps):
        schedule.before_step(step / steps, steps)
        found.append(schedule.learning_rate)
    return found


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_one_cycle_is_torchs_momentum_included(kind: Any) -> None:
    epochs, steps = 3, 7
    _, ours, schedule = made(optimizer=kind, base_lr=0.1, epochs=epochs)
    _, theirs, _ = made(optimizer=kind, base_lr=0.1, epochs=epochs)
    cycle = OneCycleLR(theirs, 0.1, epochs=epochs, steps_per_epoch=steps)
    for step in range(epochs * steps):
        schedule.before_step(step / steps, steps)
        mine, wanted = ours.param_groups[0], theirs.param_groups[0]
        assert mine["lr"] == pytest.approx(wanted["lr"], rel=1e-6)
        key = "betas" if "betas" in mine else "momentum"
        assert mine[key] == pytest.approx(wanted[key])
        theirs.step()
        if step + 1 < epochs * steps:
            cycle.step()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_cycle_does_for_the_shortest_runs(steps: int) -> None:
    _, _, schedule = made(epochs=1)
    assert all(math.isfinite(rate) and rate > 0 for rate in rates(schedule, 1, steps))


def test_cosine_falls_to_nothing() -> None:
    _, _, schedule = made(scheduler="cosine", base_lr=1.0, epochs=4)
    found = rates(schedule, 4, 5)
    assert found[0] == 1.0
    assert found[10] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.01


def test_none_stays() -> None:
    _, _, schedule = made(scheduler="none", base_lr=0.2)
    assert set(rates(schedule, 2, 3)) == {0.2}


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_optimizer_has_what_the_parameters_say(kind: Any) -> None:
    _, optimizer, _ = made(optimizer=kind, weight_decay=0.02)
    group = optimizer.param_groups[0]
    assert type(optimizer).__name__.lower() == kind
    assert group["weight_decay"] == 0.02
    assert group["momentum"] == 0.9 if kind == "sgd" else (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-6)


# --- Tables of predictions and pictures of training images, value by value ---


# Two classes, which are the outputs 2 and 0 of a model with three; its own names of the outputs are a, b and c.
MODEL: dict[str, Any] = {"classes": ["cat", "dog"], "outputs": [2, 0], "output_names": ["a", "b", "c"]}
SURE = 50.0  # a logit that leaves nothing to the others


def test_outputs_have_the_names_of_the_classes_where_there_are_any() -> None:
    assert prediction_tables.answer_names(MODEL) == ["dog", "b", "cat"] and MODEL["output_names"] == ["a", "b", "c"]


def test_table_has_key_class_and_prediction_of_each_image() -> None:
    table = PredictionTable(["k0", "k1", "k2", "k3"], MODEL)
    assert table.rows() == []
    table.add(torch.tensor([3, 0]), torch.tensor([1, 0]), torch.tensor([0, 1]), torch.tensor([0.5, 0.25]))
    table.add(torch.tensor([2]), torch.tensor([0]), torch.tensor([2]), torch.tensor([1.0]))
    assert table.rows() == [("k3", "dog", "dog", 0.5), ("k0", "cat", "b", 0.25), ("k2", "cat", "cat", 1.0)]


def logits(*outputs: int) -> torch.Tensor:
    return SURE * torch.nn.functional.one_hot(torch.tensor(outputs), 3).float()


def test_images_of_every_fourth_step_are_kept_until_there_are_enough() -> None:
    table = TrainingTable(MODEL, 5)
    for step in range(9):
        images = torch.full((2, 3, 1, 1), step, dtype=torch.uint8)
        labels = torch.tensor([0, 1])
        table.add(images, labels, logits(2, 1))
        images.zero_()
        labels.zero_()  # buffers are used again
    rows = table.rows()
    assert [row[0][0, 0, 0].item() for row in rows] == [0, 0, 4, 4, 8]
    assert [row[1:3] for row in rows] == [("cat", "cat"), ("dog", "b")] * 2 + [("cat", "cat")]
    assert {round(row[3], 6) for row in rows} == {1.0}
    table.add(torch.zeros(2, 3, 1, 1, dtype=torch.uint8), torch.tensor([0, 1]), logits(2, 1))
    assert len(table.rows()) == 5


def test_score_is_the_share_of_the_largest_output() -> None:
    table = TrainingTable(MODEL, 1)
    table.add(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), torch.tensor([0]), torch.tensor([[0.0, 0.0, 0.0]]).log1p())
    assert table.rows()[0][3] == pytest.approx(1 / 3)
    empty = TrainingTable(MODEL, 0)
    empty.add(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), torch.tensor([0]), logits(0))
    assert empty.rows() == []


ROWS = [("k,1", "cat", "dog", 0.123456789), ("k2", "dog", "dog", 1.0)]


def test_csv_has_six_digits_and_one_line_an_image() -> None:
    assert prediction_tables.table_file(ROWS).decode() == (
        'key,label,prediction,probability\n"k,1",cat,dog,0.123457\nk2,dog,dog,1\n'
    )
    assert prediction_tables.table_file([]) == b"key,label,prediction,probability\n"


def test_strip_has_the_first_eight_images_side_by_side() -> None:
    images = torch.arange(9, dtype=torch.uint8).reshape(9, 1, 1, 1).expand(9, 3, 2, 2)
    strip = prediction_tables.example_strip(images)
    assert strip.shape == (3, 2, 16) and strip[0, 0].tolist() == [number for number in range(8) for _ in range(2)]
    assert prediction_tables.example_strip(images[:2]).shape == (3, 2, 4)


def test_caption_has_class_and_prediction_of_each_image() -> None:
    equal = torch.tensor([[1.0, 1.0, -SURE], [-SURE, SURE, -SURE]])
    words = prediction_tables.example_words(equal, torch.tensor([0, 1]), MODEL)
    assert words == "cat: dog 50%, dog: b 100%"
    many = prediction_tables.example_words(logits(*[0] * 9), torch.tensor([0] * 9), MODEL)
    assert many.count("cat: dog 100%") == 8


# --- The meter: values of each step, means of an epoch over all ranks, and its state in a checkpoint ---


class Context(SimpleNamespace):
    """What a meter uses of a rank's context."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__(logged=[])

    def log(self, values: dict[str, float], *, step: int, epoch: float) -> None:
        self.logged.append((step, epoch, values))


@pytest.fixture
def ctx() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Context()
    dist.destroy_process_group()


def sums(loss: float, hits: float) -> torch.Tensor:
    return torch.tensor([loss, hits], dtype=torch.float64)


def test_each_step_is_logged_with_its_means(ctx: Any) -> None:
    meter = Meter(ctx)
    meter.add(7, 1.5, 0.01, sums(6.0, 1.0), 4)
    meter.add(8, 1.6, 0.02, sums(5.0, 2.0), 2)
    assert ctx.logged == [
        (7, 1.5, {"train/loss": 1.5, "train/correct": 0.25, "train/learning_rate": 0.01}),
        (8, 1.6, {"train/loss": 2.5, "train/correct": 1.0, "train/learning_rate": 0.02}),
    ]


def test_step_without_images_is_not_logged(ctx: Any) -> None:
    meter = Meter(ctx)
    meter.add(1, 1.0, 0.1, sums(9.0, 0.0), 0)
    assert (ctx.logged, meter.epoch_means()) == ([], (0.0, 0.0))


def test_means_of_an_epoch_count_images_not_steps_and_go_on_from_a_checkpoint(ctx: Any) -> None:
    before, after = Meter(ctx), Meter(ctx)
    before.add(1, 1.0, 0.1, sums(6.0, 3.0), 3)
    before.add(2, 1.0, 0.1, sums(4.0, 0.0), 1)
    assert before.epoch_means() == (2.5, 0.75)
    after.restore(before.state())
    after.add(3, 1.0, 0.1, sums(2.0, 1.0), 4)
    assert after.epoch_means() == (1.5, 0.5)
    after.reset()
    after.add(4, 2.0, 0.1, sums(3.0, 1.0), 1)
    assert after.epoch_means() == (3.0, 1.0)
