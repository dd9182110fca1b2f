"""What the last validation leaves: tables, names of outputs, and pictures."""

from __future__ import annotations

import csv
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddptrain.storage.store import Location, NotFound
from ddptrain.storage.synthetic import SHAPES, SyntheticImages
from ddptrain.workloads.images import validation
from ddptrain.workloads.images.model.build_model import describe
from ddptrain.workloads.images.prediction_tables import (
    COLUMNS,
    PredictionTable,
    TrainingTable,
    answer_names,
    example_strip,
    example_words,
    table_file,
)
from ddptrain.workloads.images.validation import _sums

CONFIG = describe("small_cnn", 8, ["cat", "dog"], outputs=[2, 0], output_names=["n0 dog", "n1 car", "n2 cat"])


def test_outputs_are_called_by_the_classes_of_the_data_where_they_have_one() -> None:
    assert answer_names(CONFIG) == ["dog", "n1 car", "cat"]


def test_predictions_are_a_table_of_key_label_prediction_and_probability() -> None:
    table = PredictionTable(["cat/a,b.png", 'dog/"c".png'], CONFIG)
    table.add(torch.tensor([1]), torch.tensor([1]), torch.tensor([1]), torch.tensor([0.5]))
    table.add(torch.tensor([0]), torch.tensor([0]), torch.tensor([2]), torch.tensor([0.25]))
    header, *rows = csv.reader(table_file(table.rows()).decode().splitlines())
    assert tuple(header) == COLUMNS
    assert [(*row[:3], float(row[3])) for row in rows] == [
        ('dog/"c".png', "dog", "n1 car", 0.5),
        ("cat/a,b.png", "cat", "cat", 0.25),
    ]


def test_rank_without_images_leaves_an_empty_table() -> None:
    assert tuple(table_file([]).decode().strip().split(",")) == COLUMNS


def test_images_that_could_not_be_had_do_not_count_even_where_their_loss_is_no_number() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [float("nan")] * 6])
    sums = _sums(logits, torch.tensor([0, 0, 0]), torch.tensor([True, True, False])).tolist()
    assert sums[1:] == [1, 1, 2]
    assert sums[0] == pytest.approx(torch.nn.functional.cross_entropy(logits[:2], torch.tensor([0, 0])).item() * 2)


def test_table_of_what_was_trained_on_has_the_first_batch_and_every_fourth_after_it_within_its_bound() -> None:
    table = TrainingTable(CONFIG, 3)
    for step in range(9):
        table.add(torch.full((2, 3, 4, 4), step, dtype=torch.uint8), torch.tensor([0, 1]), torch.zeros(2, 3))
    assert [int(image[0, 0, 0]) for image, *_ in table.rows()] == [0, 0, 4], "also where an epoch has three steps"


def test_picture_of_examples_shows_eight_at_most_with_what_they_are_taken_for() -> None:
    images = torch.zeros(10, 3, 4, 4, dtype=torch.uint8)
    assert example_strip(images).shape == (3, 4, 32)
    words = example_words(torch.eye(3)[[2, 0]] * 100, torch.tensor([0, 0]), CONFIG)
    assert words == "cat: cat 100%, cat: dog 100%"


def test_drawings_are_the_same_everywhere_and_of_every_shape() -> None:
    first, second = (SyntheticImages(Location("builtin")) for _ in range(2))
    keys = [listed.key for listed in first.listing()]
    assert {key.split("/")[0] for key in keys} == set(SHAPES)
    assert [first.get(key) for key in keys[::97]] == [second.get(key) for key in keys[::97]]
    assert len({first.get(key) for key in keys}) == len(keys) == 600
    with pytest.raises(NotFound):
        first.get("circle/../secret")


def test_unreadable_images_of_all_ranks_are_counted_with_the_reasons_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other_rank(is_bad: torch.Tensor, op: object) -> None:
        assert is_bad.tolist() == [0, 1, 0, 0] and op == torch.distributed.ReduceOp.MAX
        is_bad[3] = 1

    monkeypatch.setattr(torch.distributed, "all_reduce", other_rank)
    checked: list[Any] = []
    monkeypatch.setattr(validation, "check_bad", lambda *given: checked.extend(given))
    manifest: Any = SimpleNamespace(keys="abcd", train=[0, 1, 2], val=[3], name=lambda index: "abcd"[index])
    loader: Any = SimpleNamespace(bad_index=[1], bad=[("b", "truncated")])
    validation.check_bad_on_all_ranks(loader, manifest, 0.25, torch.device("cpu"))
    assert checked == [2, 4, 0.25, {"b": "truncated", "d": "see the logs of the other ranks"}]
