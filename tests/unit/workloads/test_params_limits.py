"""The default and the limits of each parameter of the built-in workloads: users rely on both."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ddptrain.workloads.images.params import CacheParams, ImagesParams
from ddptrain.workloads.petnames.params import PetnamesParams

LARGEST_SEED = 2**31 - 1


@pytest.mark.parametrize(
    ("model", "field", "accepted", "refused"),
    [
        (CacheParams, "max_gb", (1e-9, 1e6), (0.0, 1000001.0)),
        (ImagesParams, "subset", (1,), (0,)),
        (ImagesParams, "train_pct", (0.001, 1.0), (0.0, 1.001)),
        (ImagesParams, "image_size", (8, 2048), (7, 2049)),
        (ImagesParams, "epochs", (1,), (0,)),
        (ImagesParams, "batch_size", (1, 65536), (0, 65537)),
        (ImagesParams, "base_lr", (1e-9, 10.0), (0.0, 10.001)),
        (ImagesParams, "weight_decay", (0.0, 10.0), (-0.001, 10.001)),
        (ImagesParams, "loader_workers", (0, 256), (-1, 257)),
        (ImagesParams, "requests", (1, 1024), (0, 1025)),
        (ImagesParams, "max_bad_fraction", (0.0, 1.0), (-0.001, 1.001)),
        (ImagesParams, "seed", (0, LARGEST_SEED), (-1, LARGEST_SEED + 1)),
        (PetnamesParams, "names", ("n",), ("",)),
        (PetnamesParams, "val_fraction", (0.0, 0.9), (-0.001, 0.901)),
        (PetnamesParams, "window", (1, 64), (0, 65)),
        (PetnamesParams, "embedding_size", (1, 4096), (0, 4097)),
        (PetnamesParams, "hidden_size", (1, 8192), (0, 8193)),
        (PetnamesParams, "layers", (1, 32), (0, 33)),
        (PetnamesParams, "dropout", (0.0, 0.999), (-0.001, 1.0)),
        (PetnamesParams, "output_dropout", (0.0, 0.999), (-0.001, 1.0)),
        (PetnamesParams, "weights", ("model:a",), ("a", "model:")),
        (PetnamesParams, "epochs", (1,), (0,)),
        (PetnamesParams, "batch_size", (1,), (0,)),
        (PetnamesParams, "learning_rate", (1e-9, 10.0), (0.0, 10.001)),
        (PetnamesParams, "weight_decay", (0.0, 10.0), (-0.001, 10.001)),
        (PetnamesParams, "grad_clip", (0.0,), (-0.001,)),
        (PetnamesParams, "seed", (0, LARGEST_SEED), (-1, LARGEST_SEED + 1)),
    ],
)
def test_values_are_accepted_up_to_their_limits(
    model: type[BaseModel], field: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in accepted:
        assert getattr(model.model_validate({field: value}), field) == value
    for value in refused:
        with pytest.raises(ValidationError):
            model.model_validate({field: value})


@pytest.mark.parametrize("model", [CacheParams, ImagesParams, PetnamesParams])
def test_parameters_are_strict_and_never_change(model: type[BaseModel]) -> None:
    given = model()
    field = next(iter(model.model_fields))
    with pytest.raises(ValidationError):
        setattr(given, field, getattr(given, field))
    for wrong in (
        {"no_such": 1},
        {"epochs": "3"},
        {"max_gb": "3"},
        {"base_lr": float("inf")},
        {"max_gb": float("nan")},
    ):
        with pytest.raises(ValidationError):
            model.model_validate(wrong)
