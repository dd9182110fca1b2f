"""The data of the model that `ddptrain init` writes."""

from __future__ import annotations

import math

import torch

from ddptrain.starter.train import spirals


def test_points_are_on_two_spirals_that_are_half_a_turn_apart() -> None:
    points, labels = spirals(2000)
    assert points.shape == (2000, 2) and points.dtype == torch.float32
    assert set(labels.tolist()) == {0.0, 1.0} and 0.45 < labels.mean() < 0.55
    radius = points.norm(dim=1)
    assert 0.85 < radius.max() < 1.05, "three half turns, a tenth of which is the radius"
    angle = torch.atan2(points[:, 1], points[:, 0]) - 10 * radius - math.pi * labels
    outer = torch.cos(angle)[radius > 0.3]  # the noise of 0.02 moves angles of inner points more
    assert outer.mean() > 0.9


def test_every_rank_draws_the_same_points() -> None:
    assert all(torch.equal(one, other) for one, other in zip(spirals(10), spirals(10), strict=True))
