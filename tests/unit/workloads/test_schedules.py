"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.train import make_optimizer
from ddptrain.workloads.schedules import make_schedule


def rates(name: str, steps: int, begin: int = 0) -> list[float]:
    """The rate of each step from `begin` on; the highest is 0.1."""
    optimizer, step = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 0.7), begin
    schedule, found = make_schedule(name, optimizer, 0.1, lambda: step / steps), []
    while step < steps:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        step += 1
        schedule.step()
    return found


@pytest.mark.parametrize("name", ["one_cycle", "cosine", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 20])
def test_rate_depends_on_the_position_alone(name: str, steps: int) -> None:
    whole = rates(name, steps)
    assert all(0 < rate <= 0.1 for rate in whole)
    assert rates(name, steps, steps // 2) == pytest.approx(whole[steps // 2 :])


def test_shapes() -> None:
    cycle, cosine = rates("one_cycle", 100), rates("cosine", 100)
    assert cycle[0] == pytest.approx(0.004) and cycle[30] == pytest.approx(0.1) and cycle[-1] < 1e-4
    assert cosine[0] == 0.1 and cosine[50] == pytest.approx(0.05) and cosine == sorted(cosine, reverse=True)
    assert set(rates("none", 3)) == {0.1}


def test_plateau_falls_after_three_epochs_without_a_better_loss_and_continues() -> None:
    def made(saved: Any = None) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 0.1)
        return optimizer, make_schedule("plateau", optimizer, 0.1, lambda: math.nan, saved)

    _, first = made()
    for loss in (1.0, 1.1, 1.2):
        first.step(loss)
    optimizer, again = made(first.state_dict())
    again.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_optimizer_has_what_the_parameters_say(kind: Any) -> None:
    optimizer = make_optimizer(ImagesParams(optimizer=kind, weight_decay=0.02), torch.nn.Linear(2, 1).parameters())
    group = optimizer.param_groups[0]
    assert type(optimizer).__name__.lower() == kind
    assert group["weight_decay"] == 0.02
    assert group["momentum"] == 0.9 if kind == "sgd" else (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-6)


def test_plateau_after_another_schedule_begins_anew_with_the_highest_rate() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 0.1)
    before = make_schedule("cosine", optimizer, 0.1, lambda: 0.9)
    optimizer.step()
    before.step()
    assert optimizer.param_groups[0]["lr"] < 0.01
    plateau = make_schedule("plateau", optimizer, 0.1, lambda: 0.9, before.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    for loss in (1.0, 1.0, 1.0):
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.1
    plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
