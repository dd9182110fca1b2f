"""Which checkpoint is the best one, and which are deleted."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.results.checkpoints.run_checkpoints import (
    CheckpointPolicy,
    Saved,
    are_finite,
    best_checkpoint,
    superseded,
)
from ddptrain.results.run_record import BestRecord

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ({1: 0.5, 2: 0.3, 3: 0.4}, "min", (0.3, 2)),
        ({1: 0.5, 2: 0.7, 3: 0.6}, "max", (0.7, 2)),
        ({1: 0.3, 2: 0.3}, "min", (0.3, 2)),
        ({1: 0.7, 2: 0.7}, "max", (0.7, 2)),
        ({1: NAN, 2: -INF, 3: 0.9}, "min", (0.9, 3)),
        ({1: INF, 2: 0.1}, "max", (0.1, 2)),
        ({1: None, 2: 0.0}, "min", (0.0, 2)),
    ],
)
def test_best_checkpoint_has_the_last_lowest_or_highest_finite_value(
    values: dict[int, float | None], mode: Any, best: tuple[float, int]
) -> None:
    saved = [Saved(step, {} if value is None else {"val/loss": value, "x": 9.0}) for step, value in values.items()]
    assert best_checkpoint(saved, CheckpointPolicy(mode=mode)) == BestRecord("val/loss", mode, *best)


def test_best_checkpoint_is_finite_if_there_is_one() -> None:
    broken, good = Saved(1, {"val/loss": 0.1}, finite=False), Saved(2, {"val/loss": 0.2})
    for saved, best in (([broken, good], good), ([broken], broken)):
        found = best_checkpoint(saved, CheckpointPolicy())
        assert found is not None and found.step == best.step


@pytest.mark.parametrize("metrics", [None, {}, {"x": 1.0}, {"val/loss": NAN}])
def test_no_checkpoint_is_the_best_without_a_value(metrics: dict[str, float] | None) -> None:
    assert best_checkpoint([] if metrics is None else [Saved(1, metrics)], CheckpointPolicy()) is None


def test_no_checkpoint_is_the_best_without_a_metric() -> None:
    assert best_checkpoint([Saved(1, {"val/loss": 0.1})], CheckpointPolicy(metric=None)) is None


@pytest.mark.parametrize(
    ("metrics", "finite"),
    [
        ({}, True),
        ({"val/loss": 1.0, "val/auc": NAN}, True),
        ({"val/loss": 1.0, "train/loss": INF}, False),
        ({"val/loss": NAN}, False),
        ({"score": NAN}, False),
    ],
)
def test_metrics_show_whether_the_model_has_diverged(metrics: dict[str, float], finite: bool) -> None:
    assert are_finite(metrics, CheckpointPolicy()) is finite
    assert are_finite(metrics, CheckpointPolicy(ignore_nan=True))


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
    assert superseded([Saved(step, {}) for step in steps], record, CheckpointPolicy(keep=keep)) == deleted


def test_last_finite_checkpoint_is_kept() -> None:
    saved = [Saved(step, {}, finite=step <= 2) for step in (1, 2, 3, 4, 5)]
    assert superseded(saved, None, CheckpointPolicy(keep=2)) == [1, 3]
