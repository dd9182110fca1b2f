"""What the configuration's `prepare` does in the built-in workloads: accumulation and precision."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddptrain.protocol import events
from ddptrain.workloads.images import model as build_model
from ddptrain.workloads.images import train as images
from ddptrain.workloads.images.listing import prepare
from ddptrain.workloads.petnames import train as petnames
from tests.unit.rank.ranks import Rank

Train = Callable[..., tuple[dict[str, Tensor], list[int]]]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Trains one rank; returns its weights, and the steps at which it logged train/loss."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def run(workload: Any, params: dict[str, Any], inputs: str = "", **prepared: Any) -> Any:
        folder = tmp_path / f"rank-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        rank = Rank(folder, prepare=prepared, inputs=inputs)
        workload.train(rank.context, **params)
        told = rank.events()
        rank.file.close()
        *_, saved = [event for event in told if isinstance(event, events.CheckpointSaved)]
        steps = [event.step for event in told if isinstance(event, events.Metrics) and "train/loss" in event.values]
        return load_file(folder / "staging" / saved.staging / "model.safetensors"), steps

    yield run
    dist.destroy_process_group()


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "names.txt").write_text(
        "\n".join(f"{first}{last}" for first in "abcdefgh" for last in ("na", "xy", "on"))
    )
    small = {"hidden_size": 8, "layers": 1, "context": "full", "val_fraction": 0.0, "epochs": 2, "dropout": 0.0}
    return {**small, "names": str(tmp_path / "names.txt"), "learning_rate": 0.01, "grad_clip": 0.5}


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """Parameters and the list of 24 images; the model has no batch norm, which depends on the size of a batch."""
    monkeypatch.setattr(
        build_model, "_convolution", lambda before, after: (nn.Conv2d(before, after, 3, padding=1), nn.ReLU())
    )
    chance = random.Random(0)
    for name in ("cat", "dog"):
        (tmp_path / "source" / name).mkdir(parents=True)
        for number in range(12):
            image = Image.new("RGB", (8, 8))
            image.putdata([(chance.randint(0, 255), 90 if name == "cat" else 0, 9) for _ in range(64)])
            image.save(tmp_path / "source" / name / f"{number}.png")
    params: dict[str, Any] = {"source": str(tmp_path / "source"), "architecture": "small_cnn", "image_size": 8}
    params |= {"loader_workers": 0, "train_pct": 1.0, "epochs": 2, "base_lr": 0.01}
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    prepare(params, inputs, lambda _: None)
    return params, str(inputs)


def assert_close(some: dict[str, Tensor], others: dict[str, Tensor], tolerance: float) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        torch.testing.assert_close(value, others[name], rtol=tolerance, atol=tolerance)


def test_pet_names_in_four_batches_of_three_train_as_in_one_of_twelve(train: Train, names: dict[str, Any]) -> None:
    some, _ = train(petnames, {**names, "batch_size": 3}, accumulate=4)
    whole, _ = train(petnames, {**names, "batch_size": 12})
    assert_close(some, whole, 1e-4)
    other, _ = train(petnames, {**names, "batch_size": 3})
    with pytest.raises(AssertionError):
        assert_close(other, whole, 1e-3)


def test_images_in_four_batches_of_three_train_as_in_one_of_twelve(
    train: Train, pictures: tuple[dict[str, Any], str]
) -> None:
    params, inputs = pictures
    some, steps = train(images, {**params, "batch_size": 3}, inputs, accumulate=4)
    whole, whole_steps = train(images, {**params, "batch_size": 12}, inputs)
    assert steps == whole_steps == [1, 2, 3, 4], "steps are those of the optimizer"
    assert_close(some, whole, 1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_workloads_train_in_half_precision(
    train: Train, names: dict[str, Any], pictures: tuple[dict[str, Any], str], precision: str
) -> None:
    params, inputs = pictures
    for workload, given, of in ((petnames, {**names, "batch_size": 12}, ""), (images, params, inputs)):
        half, _ = train(workload, given, of, precision=precision, accumulate=2)
        assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in half.values())
        whole, _ = train(workload, given, of, accumulate=2)
        assert_close(half, whole, 0.1)
        assert any(not torch.equal(value, whole[name]) for name, value in half.items())
