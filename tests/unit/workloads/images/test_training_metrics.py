"""The meter: values of each step, means of an epoch over all ranks, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddptrain.workloads.images.train import Meter


class Context(SimpleNamespace):
    """What a meter uses of a rank's context."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__(logged=[])

    def log(self, values: dict[str, float], *, step: int, epoch: float) -> None:
        self.logged.append((step, epoch, values))


@pytest.fixture
def ctx() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Context()
    dist.destroy_process_group()


def sums(loss: float, hits: float) -> torch.Tensor:
    return torch.tensor([loss, hits], dtype=torch.float64)


def test_each_step_is_logged_with_its_means(ctx: Any) -> None:
    meter = Meter(ctx)
    meter.add(7, 1.5, 0.01, sums(6.0, 1.0), 4)
    meter.add(8, 1.6, 0.02, sums(5.0, 2.0), 2)
    assert ctx.logged == [
        (7, 1.5, {"train/loss": 1.5, "train/correct": 0.25, "train/learning_rate": 0.01}),
        (8, 1.6, {"train/loss": 2.5, "train/correct": 1.0, "train/learning_rate": 0.02}),
    ]


def test_steps_wait_for_a_reading_where_readings_are_slow(ctx: Any) -> None:
    meter = Meter(ctx)
    meter._most_waiting = 3
    for step in (1, 2):
        meter.add(step, 1.0, 0.1, sums(1.0, 0.0), 1)
    assert ctx.logged == []
    meter.add(3, 1.0, 0.1, sums(1.0, 0.0), 1)
    assert [step for step, *_ in ctx.logged] == [1, 2, 3]
    meter.add(4, 1.0, 0.1, sums(1.0, 0.0), 1)
    meter.flush()
    meter.flush()
    assert [step for step, *_ in ctx.logged] == [1, 2, 3, 4]


def test_step_without_images_is_not_logged(ctx: Any) -> None:
    meter = Meter(ctx)
    meter.add(1, 1.0, 0.1, sums(9.0, 0.0), 0)
    assert (ctx.logged, meter.epoch_means()) == ([], (0.0, 0.0))


def test_means_of_an_epoch_count_images_not_steps_and_go_on_from_a_checkpoint(ctx: Any) -> None:
    before, after = Meter(ctx), Meter(ctx)
    before.add(1, 1.0, 0.1, sums(6.0, 3.0), 3)
    before.add(2, 1.0, 0.1, sums(4.0, 0.0), 1)
    assert before.epoch_means() == (2.5, 0.75)
    after.restore(before.state())
    after.add(3, 1.0, 0.1, sums(2.0, 1.0), 4)
    assert after.epoch_means() == (1.5, 0.5)
    after.reset()
    after.add(4, 2.0, 0.1, sums(3.0, 1.0), 1)
    assert after.epoch_means() == (3.0, 1.0)
