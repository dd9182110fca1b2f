"""The pictures and tables of an image training, value by value."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddptrain.workloads.images.data import Batch
from ddptrain.workloads.images.model import answer_names
from ddptrain.workloads.images.train import Pictures

# Two classes, which are the outputs 2 and 0 of a model with three; its own names of the outputs are a, b and c.
MODEL: dict[str, Any] = {
    "classes": ["cat", "dog"],
    "outputs": [2, 0],
    "output_names": ["a", "b", "c"],
    "image_size": 200,
}
SURE = 50.0  # a logit that leaves nothing to the others
KEYS = ["k0", "k1", "k,2", "k3"]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Context(SimpleNamespace):
    """Rank 0 of one, which keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1, device=torch.device("cpu"), images=[], tables={}, files={})

    def log_image(self, name: str, image: torch.Tensor, *, step: int, caption: str) -> None:
        self.images.append((name, image, step, caption))

    def log_table(self, name: str, columns: Any, rows: Any, *, step: int) -> None:
        assert (columns, step) == (("image", "label", "prediction", "score"), 7)
        self.tables[name] = rows

    def save_file(self, path: str, data: bytes) -> None:
        self.files[path] = data


@pytest.fixture
def ctx() -> Any:
    return Context()


def batch(labels: list[int], index: list[int] | None = None, value: int = 0, size: int = 1) -> Batch:
    images = torch.full((len(labels), 3, size, size), value, dtype=torch.uint8)
    return Batch(images, torch.tensor(labels), torch.tensor(index or [0] * len(labels)), {})


def logits(*outputs: int) -> torch.Tensor:
    return SURE * torch.nn.functional.one_hot(torch.tensor(outputs), 3).float()


def test_outputs_have_the_names_of_the_classes_where_there_are_any() -> None:
    assert answer_names(MODEL) == ["dog", "b", "cat"] and MODEL["output_names"] == ["a", "b", "c"]


def test_file_has_key_class_and_prediction_of_each_image(ctx: Any) -> None:
    pictures = Pictures(ctx, KEYS, MODEL)
    pictures.validated(batch([1, 0], [3, 0]), torch.tensor([[0.75, 0.125, 0.125], [0.25, 0.5, 0.25]]).log())
    pictures.validated(batch([0], [2]), logits(2))
    pictures.save(7, has_validated=True)
    lines = ctx.files["predictions/rank-0.csv"].splitlines()
    assert lines == [b"key,label,prediction,probability", b"k3,dog,dog,0.75", b"k0,cat,b,0.5", b'"k,2",cat,cat,1']


def test_mistakes_are_those_with_the_highest_scores_as_thumbnails(ctx: Any) -> None:
    pictures = Pictures(ctx, KEYS, MODEL)
    for number in range(30):
        scores = torch.tensor([[0.5, 0.25 + number / 1000, 0.0], [1.0, 0.0, 0.0]])
        scores[:, 2] = 1 - scores.sum(1)
        is_wrong = 1 - number % 2  # the second label is right in each second batch
        pictures.validated(batch([0, 1 - is_wrong], value=number, size=200), scores.log())
    pictures.save(7, has_validated=True)
    rows = ctx.tables["val_mistakes"]
    assert len(rows) == 24 and {tuple(row[0].shape) for row in rows} == {(3, 160, 160)}
    assert [row[1:] for row in rows[:15]] == [("cat", "dog", pytest.approx(1.0))] * 15
    assert [row[1:] for row in rows[15:]] == [("cat", "dog", pytest.approx(0.5))] * 9
    assert [int(row[0].float().mean()) for row in rows[:15]] == list(range(0, 30, 2))


def test_run_without_validation_has_no_table_of_mistakes(ctx: Any) -> None:
    Pictures(ctx, KEYS, MODEL).save(7, has_validated=False)
    assert ctx.tables == {"train_predictions": []} and ctx.files == {}


def test_images_of_every_fourth_step_are_kept_until_there_are_enough(ctx: Any) -> None:
    pictures = Pictures(ctx, KEYS, MODEL)
    for number in range(9):
        shown = batch([0, 1] * 200, value=number)
        pictures.trained(number, shown, logits(*[2, 1] * 200))
        shown.images.zero_()  # buffers are used again
    pictures.save(7, has_validated=False)
    rows = ctx.tables["train_predictions"]
    values = [row[0][0, 0, 0].item() for row in rows]
    assert values == [0] * 400 + [4] * 400 + [8] * 200
    assert [row[1:] for row in rows[:2]] == [("cat", "cat", 1.0), ("dog", "b", 1.0)]


def test_example_has_the_first_eight_images_side_by_side_with_their_predictions(ctx: Any) -> None:
    pictures = Pictures(ctx, KEYS, MODEL)
    images = torch.arange(9, dtype=torch.uint8).reshape(9, 1, 1, 1).expand(9, 3, 2, 2)
    shown = Batch(images, torch.tensor([0, 1] + [0] * 7), torch.arange(9), {})
    equal = torch.tensor([1.0, 1.0, -SURE])
    for step in (1, 2, 3):
        pictures.example(shown, torch.cat([equal[None], logits(*[1] * 8)]), step, every=2)
    (name, strip, step, caption), (*_, second, _) = ctx.images
    assert (name, step, second, tuple(strip.shape)) == ("examples", 1, 3, (3, 2, 16))
    assert strip[0, 0].tolist() == [number for number in range(8) for _ in range(2)]
    assert caption.startswith("cat: dog 50%, dog: b 100%, cat: b 100%") and caption.count(": ") == 8
