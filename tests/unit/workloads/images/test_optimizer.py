"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.train import Schedule, make_optimizer


def made(**params: Any) -> tuple[ImagesParams, torch.optim.Optimizer, Schedule]:
    settings = ImagesParams(**params)
    optimizer = make_optimizer(settings, nn.Linear(2, 1).parameters())
    return settings, optimizer, Schedule(settings, optimizer)


def rates(schedule: Schedule, epochs: int, steps: int) -> list[float]:
    found = []
    for step in range(epochs * steps):
        schedule.before_step(step / steps, steps)
        found.append(schedule.learning_rate)
    return found


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_one_cycle_is_torchs_momentum_included(kind: Any) -> None:
    epochs, steps = 3, 7
    _, ours, schedule = made(optimizer=kind, base_lr=0.1, epochs=epochs)
    _, theirs, _ = made(optimizer=kind, base_lr=0.1, epochs=epochs)
    cycle = OneCycleLR(theirs, 0.1, epochs=epochs, steps_per_epoch=steps)
    for step in range(epochs * steps):
        schedule.before_step(step / steps, steps)
        mine, wanted = ours.param_groups[0], theirs.param_groups[0]
        assert mine["lr"] == pytest.approx(wanted["lr"], rel=1e-6)
        key = "betas" if "betas" in mine else "momentum"
        assert mine[key] == pytest.approx(wanted[key])
        theirs.step()
        if step + 1 < epochs * steps:
            cycle.step()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_cycle_does_for_the_shortest_runs(steps: int) -> None:
    _, _, schedule = made(epochs=1)
    assert all(math.isfinite(rate) and rate > 0 for rate in rates(schedule, 1, steps))


def test_cosine_falls_to_nothing() -> None:
    _, _, schedule = made(scheduler="cosine", base_lr=1.0, epochs=4)
    found = rates(schedule, 4, 5)
    assert found[0] == 1.0
    assert found[10] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.01


def test_none_stays() -> None:
    _, _, schedule = made(scheduler="none", base_lr=0.2)
    assert set(rates(schedule, 2, 3)) == {0.2}


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_optimizer_has_what_the_parameters_say(kind: Any) -> None:
    _, optimizer, _ = made(optimizer=kind, weight_decay=0.02)
    group = optimizer.param_groups[0]
    assert type(optimizer).__name__.lower() == kind
    assert group["weight_decay"] == 0.02
    assert group["momentum"] == 0.9 if kind == "sgd" else (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-6)
