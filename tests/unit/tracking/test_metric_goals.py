"""Whether a higher or a lower value of a metric is better."""

from __future__ import annotations

import pytest

from ddptrain.tracking.metric_goals import goal_of


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("train/loss", "min"),
        ("val_loss", "min"),
        ("val/accuracy", "max"),
        ("val/top5", "max"),
        ("train/learning_rate", ""),
        ("samples_per_s", ""),
        ("glossary", ""),
    ],
)
def test_best_is_known_from_the_name(name: str, goal: str) -> None:
    assert goal_of(name) == goal


def test_checkpoints_metric_is_best_as_the_configuration_says() -> None:
    assert goal_of("val/loss", "val/loss", "max") == "max"
