"""The optimizer, metrics and tables of an image training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddptrain.workloads.images import evaluate as prediction_tables
from ddptrain.workloads.images.classifier import answer_names
from ddptrain.workloads.images.evaluate import PredictionTable, TrainingTable

# --- Tables of predictions and pictures of training images, value by value ---


# Two classes, which are the outputs 2 and 0 of a model with three; its own names of the outputs are a, b and c.
MODEL: dict[str, Any] = {"classes": ["cat", "dog"], "outputs": [2, 0], "output_names": ["a", "b", "c"]}
SURE = 50.0  # a logit that leaves nothing to the others


def test_outputs_have_the_names_of_the_classes_where_there_are_any() -> None:
    assert answer_names(MODEL) == ["dog", "b", "cat"] and MODEL["output_names"] == ["a", "b", "c"]


def test_table_has_key_class_and_prediction_of_each_image() -> None:
    table = PredictionTable(["k0", "k1", "k,2", "k3"], MODEL)
    assert table.csv() == b"key,label,prediction,probability\n"
    table.add(torch.tensor([3, 0]), torch.tensor([1, 0]), torch.tensor([0, 1]), torch.tensor([0.123456789, 0.25]))
    table.add(torch.tensor([2]), torch.tensor([0]), torch.tensor([2]), torch.tensor([1.0]))
    assert table.csv().splitlines()[1:] == [b"k3,dog,dog,0.123457", b"k0,cat,b,0.25", b'"k,2",cat,cat,1']


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
