"""Names and histograms, as W&B takes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddptrain.tracking import items
from ddptrain.tracking.wandb.wandb_artifacts import artifact_name, histograms, to_table


@pytest.mark.parametrize(
    ("text", "name"), [("val/worst of all", "val_worst_of_all"), ("ok-1.2_x", "ok-1.2_x"), ("x" * 200, "x" * 128)]
)
def test_name_has_only_what_is_allowed(text: str, name: str) -> None:
    assert artifact_name(text) == name


def test_table_has_its_first_rows_and_plain_numbers() -> None:
    rows: Any = ((np.float32(0.5), "a"), (2, None), (3, "c"))
    table = to_table(items.Table(0, "t", ("x", "y"), rows), 2)
    assert (table.columns, table.data) == (["x", "y"], [[0.5, "a"], [2, None]])
    assert type(table.data[0][0]) is float


def test_histograms_count_finite_values_of_what_is_watched() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 1.0, 1.0, math.inf]]))
    found = histograms(model, "parameters")
    assert list(found) == ["parameters/weight"]
    histogram = found["parameters/weight"]
    assert (sum(histogram.histogram), histogram.histogram[0], histogram.histogram[-1]) == (3, 1, 2)
    assert histograms(model, "gradients") == {}, "there are none before the first backward pass"
    model(torch.ones(1, 4)).nan_to_num(posinf=0.0).sum().backward()
    assert sorted(histograms(model, "all")) == ["gradients/weight", "parameters/weight"]


def test_large_tensor_is_sampled() -> None:
    model = torch.nn.Linear(1000, 400, bias=False)
    counted = sum(histograms(model, "parameters")["parameters/weight"].histogram)
    assert counted == math.ceil(400_000 / (400_000 // 65_536))


def test_name_of_a_table_is_safe(tmp_path: Path) -> None:
    from ddptrain.tracking.wandb.wandb_artifacts import to_table_artifact

    artifact = to_table_artifact(items.Table(0, "val/worst", ("x",), ((1,),), 7), 10, "run-1", 1)
    assert (artifact.name, artifact.type, artifact.metadata) == ("val_worst_run-1_rank_1", "val_worst", {"step": 7})
