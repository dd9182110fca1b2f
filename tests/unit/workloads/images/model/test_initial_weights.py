"""The description of the model at the start, and what is told about its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.workloads.images import model as initial_weights
from ddptrain.workloads.images.model import MEAN, STD
from ddptrain.workloads.images.params import ImagesParams

KNOWN = SimpleNamespace(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), transforms=None)
KNOWN.transforms = lambda: KNOWN


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_weights, "find_pretrained", lambda architecture, weights: KNOWN)


def described(**params: Any) -> dict[str, Any]:
    settings = ImagesParams.model_validate({"architecture": "resnet50", "image_size": 32, **params})
    return initial_weights.described_model(settings, ["cat", "dog"])


@pytest.mark.parametrize(
    ("weights", "mean", "std"),
    [(None, MEAN, STD), ("model.pth", MEAN, STD), ("DEFAULT", KNOWN.mean, KNOWN.std)],
)
def test_pixels_are_normalised_as_for_the_weights(weights: str | None, mean: Any, std: Any) -> None:
    found = described(weights=weights)
    assert (tuple(found["mean"]), tuple(found["std"])) == (tuple(mean), tuple(std))
    assert (found["image_size"], found["classes"], found["n_outputs"]) == (32, ["cat", "dog"], 2)
