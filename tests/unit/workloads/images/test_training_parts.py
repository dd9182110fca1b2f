"""The optimizer, metrics and tables of an image training."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from ddptrain.workloads.images import prediction_tables
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.prediction_tables import PredictionTable, TrainingTable
from ddptrain.workloads.images.train import StepLog, make_optimizer, set_learning_rate

# --- The learning rate over a run ---


def made(**params: Any) -> tuple[ImagesParams, torch.optim.Optimizer]:
    settings = ImagesParams(**params)
    return settings, make_optimizer(settings, nn.Linear(2, 1).parameters())


def rates(steps: int, **params: Any) -> list[float]:
    settings, optimizer = made(**params)
    found = []
    for step in range(settings.epochs * steps):
        set_learning_rate(optimizer, settings, step / steps, steps)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_one_cycle_is_torchs_momentum_included(kind: Any) -> None:
    epochs, steps = 3, 7
    settings, ours = made(optimizer=kind, base_lr=0.1, epochs=epochs)
    _, theirs = made(optimizer=kind, base_lr=0.1, epochs=epochs)
    cycle = OneCycleLR(theirs, 0.1, epochs=epochs, steps_per_epoch=steps)
    for step in range(epochs * steps):
        set_learning_rate(ours, settings, step / steps, steps)
        mine, wanted = ours.param_groups[0], theirs.param_groups[0]
        assert mine["lr"] == pytest.approx(wanted["lr"], rel=1e-6)
        key = "betas" if "betas" in mine else "momentum"
        assert mine[key] == pytest.approx(wanted[key])
        theirs.step()
        if step + 1 < epochs * steps:
            cycle.step()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_cycle_does_for_the_shortest_runs(steps: int) -> None:
    assert all(math.isfinite(rate) and rate > 0 for rate in rates(steps, epochs=1))


def test_cosine_falls_to_nothing() -> None:
    found = rates(5, scheduler="cosine", base_lr=1.0, epochs=4)
    assert found[0] == 1.0
    assert found[10] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.01


def test_none_stays() -> None:
    assert set(rates(3, scheduler="none", base_lr=0.2, epochs=2)) == {0.2}


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_optimizer_has_what_the_parameters_say(kind: Any) -> None:
    _, optimizer = made(optimizer=kind, weight_decay=0.02)
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


# --- What is logged of steps ---


def test_each_step_is_logged() -> None:
    logged: list[tuple[Any, ...]] = []
    log = lambda values, *, step, epoch: logged.append((step, epoch, values))  # noqa: E731
    steps = StepLog(cast("Any", SimpleNamespace(device=torch.device("cpu"), log=log)))
    steps.add(7, 1.5, 0.01, torch.tensor(1.5), torch.tensor(0.25))
    assert logged == [(7, 1.5, {"train/loss": 1.5, "train/correct": 0.25, "train/learning_rate": 0.01})]
    steps.flush()
    assert len(logged) == 1
