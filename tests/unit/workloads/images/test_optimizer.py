"""The learning rate over a run, and what is scaled, lowered and kept of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from ddptrain.workloads.images.optimizer import Schedule, highest_rate, make_optimizer
from ddptrain.workloads.images.params import ImagesParams


def made(**params: Any) -> tuple[ImagesParams, torch.optim.Optimizer, Schedule]:
    settings = ImagesParams(**params)
    optimizer = make_optimizer(settings, nn.Linear(2, 1).parameters(), settings.base_lr)
    return settings, optimizer, Schedule(settings, optimizer, settings.base_lr)


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


def test_step_falls_every_few_epochs_also_where_shares_add_up_to_a_little_less() -> None:
    _, _, schedule = made(scheduler="step", base_lr=1.0, step_size=2, gamma=0.5, epochs=5)
    found = [rates(schedule, 5, 3)[epoch * 3] for epoch in range(5)]
    assert found == [1.0, 1.0, 0.5, 0.5, 0.25]
    schedule.before_step(2 - 1e-12, 3)
    assert schedule.learning_rate == 0.5


def test_none_stays() -> None:
    _, _, schedule = made(scheduler="none", base_lr=0.2)
    assert set(rates(schedule, 2, 3)) == {0.2}


def test_plateau_falls_after_patience_and_goes_on_from_a_checkpoint() -> None:
    params = {"scheduler": "plateau", "base_lr": 1.0, "patience": 1, "gamma": 0.5}
    _, optimizer, schedule = made(**params)
    told = [schedule.after_validation(loss) for loss in (2.0, 1.0, 1.5)]
    assert told == ["", "", ""]
    saved, state = schedule.state_dict(), optimizer.state_dict()
    assert "from 1 to 0.5" in schedule.after_validation(1.5)

    _, other, resumed = made(**params)
    other.load_state_dict(state)
    resumed.load_state_dict(saved)
    resumed.before_step(3.0, 10)
    assert resumed.learning_rate == 1.0
    assert "from 1 to 0.5" in resumed.after_validation(1.5)
    resumed.before_step(4.0, 10)
    assert resumed.learning_rate == 0.5


def test_checkpoint_of_another_schedule_begins_afresh() -> None:
    _, _, plateau = made(scheduler="plateau")
    _, _, other = made(scheduler="cosine")
    other.load_state_dict(plateau.state_dict())
    plateau.load_state_dict(other.state_dict())
    assert plateau.after_validation(1.0) == ""


def test_rate_is_scaled_on_request_only() -> None:
    assert highest_rate(ImagesParams(base_lr=0.1), 4) == 0.1
    assert highest_rate(ImagesParams(base_lr=0.1, scale_lr=True), 4) == 0.4


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_optimizer_has_what_the_parameters_say(kind: Any) -> None:
    _, optimizer, _ = made(optimizer=kind, eps=1e-5, weight_decay=0.02, momentum=0.8)
    group = optimizer.param_groups[0]
    assert type(optimizer).__name__.lower() == kind
    assert group["weight_decay"] == 0.02
    assert group["momentum"] == 0.8 if kind == "sgd" else (group["betas"], group["eps"]) == ((0.8, 0.999), 1e-5)
