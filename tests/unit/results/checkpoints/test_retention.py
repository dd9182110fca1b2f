"""Which checkpoint is the best one, and which are deleted."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.results.checkpoints.retention import CheckpointPolicy, best_checkpoint, superseded
from ddptrain.results.run_record import BestRecord

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ({1: 0.5, 2: 0.3, 3: 0.4}, "min", (0.3, 2)),
        ({1: 0.5, 2: 0.7, 3: 0.6}, "max", (0.7, 2)),
        ({1: 0.3, 2: 0.3}, "min", (0.3, 1)),
        ({1: 0.7, 2: 0.7}, "max", (0.7, 1)),
        ({1: NAN, 2: -INF, 3: 0.9}, "min", (0.9, 3)),
        ({1: INF, 2: 0.1}, "max", (0.1, 2)),
        ({1: None, 2: 0.0}, "min", (0.0, 2)),
    ],
)
def test_best_checkpoint_has_the_first_lowest_or_highest_finite_value(
    values: dict[int, float | None], mode: Any, best: tuple[float, int]
) -> None:
    metrics = {step: {} if value is None else {"val/loss": value, "x": 9.0} for step, value in values.items()}
    assert best_checkpoint(metrics, CheckpointPolicy(mode=mode)) == BestRecord("val/loss", mode, *best)


@pytest.mark.parametrize("metrics", [{}, {1: {}}, {1: {"x": 1.0}}, {1: {"val/loss": NAN}}])
def test_no_checkpoint_is_the_best_without_a_value(metrics: dict[int, dict[str, float]]) -> None:
    assert best_checkpoint(metrics, CheckpointPolicy()) is None


def test_no_checkpoint_is_the_best_without_a_metric() -> None:
    assert best_checkpoint({1: {"val/loss": 0.1}}, CheckpointPolicy(metric=None)) is None


@pytest.mark.parametrize(
    ("steps", "best", "keep", "deleted"),
    [
        ([1, 2, 3, 4], None, 3, [1]),
        ([1, 2, 3, 4], 1, 3, []),
        ([1, 2, 3, 4], 4, 2, [1, 2]),
        ([1, 2, 3, 4], 2, 1, [1, 3]),
        ([1, 2, 3], 2, 3, []),
        ([5, 9, 2], None, 1, [5, 9]),
        ([], None, 1, []),
    ],
)
def test_newest_checkpoints_and_the_best_one_are_kept(
    steps: list[int], best: int | None, keep: int, deleted: list[int]
) -> None:
    record = None if best is None else BestRecord("val/loss", "min", 0.1, best)
    assert superseded(steps, record, CheckpointPolicy(keep=keep)) == deleted
