"""Gradient accumulation and the gradient scaler, through ctx.prepare, ctx.backward and ctx.step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddptrain.protocol import events
from ddptrain.rank import gradients
from ddptrain.rank.gradients import GradientSteps
from tests.unit.rank.ranks import CPU, MakeRank, Rank, make_rank

__all__ = ["make_rank"]

ROWS = torch.linspace(-1, 1, 40).reshape(20, 2)


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training:
    """A small model that is trained on some rows."""

    def __init__(self, rank: Rank) -> None:
        torch.manual_seed(0)
        self.ctx = rank.context
        self.model = rank.context.prepare(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.taken: list[bool] = []

    def batch(self, rows: Tensor, **step: Any) -> bool:
        self.ctx.backward(0.01 * (self.model(rows).float() - 1).square().mean())  # fp16 can hold it x 65536
        self.taken.append(self.ctx.step(self.optimizer, **step))
        return self.taken[-1]

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def assert_close(one: Training, other: Training) -> None:
    for name, value in one.weights().items():
        torch.testing.assert_close(value, other.weights()[name], rtol=1e-5, atol=1e-6)


def test_four_batches_of_five_rows_are_a_batch_of_twenty(make_rank: MakeRank) -> None:
    some, whole = Training(make_rank(accumulate=4)), Training(make_rank())
    for _ in range(3):
        for rows in ROWS.split(5):
            some.batch(rows, clip=0.001)
        whole.batch(ROWS, clip=0.001)
    assert some.taken == [False, False, False, True] * 3
    assert_close(some, whole)


def test_ddp_averages_gradients_only_in_the_last_batch_of_a_window(make_rank: MakeRank) -> None:
    training = Training(make_rank(accumulate=3))
    synced = []
    for _ in range(6):
        training.batch(ROWS)
        synced.append(training.model.require_backward_grad_sync)
    assert synced == [False, False, True] * 2


@pytest.mark.parametrize("by_loader", [True, False])
def test_window_that_is_not_full_ends_with_the_epoch_and_its_gradient_is_the_mean_of_its_batches(
    make_rank: MakeRank, by_loader: bool
) -> None:
    some, whole = Training(make_rank(accumulate=4)), Training(make_rank())
    batches: Any = ROWS.split(5)[:3] * 2
    if by_loader:
        loader = some.ctx.loader(ROWS[:15], batch_size=5, shuffle=False)  # type: ignore[arg-type]  # rows are data
        batches = [rows for _ in range(2) for rows in loader]
        taken = [some.batch(rows) for _ in range(2) for rows in loader]
    else:
        taken = [some.batch(rows, last=number % 3 == 2) for number, rows in enumerate(batches)]
    for _ in range(2):
        whole.batch(ROWS[:15])
    assert taken == [False, False, True] * 2
    assert_close(some, whole)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("batch", [4, 5, 6])
def test_save_that_is_due_within_a_window_waits_for_its_end_and_the_resumed_run_ends_with_equal_weights(
    make_rank: MakeRank, precision: str, batch: int
) -> None:
    rank = make_rank(accumulate=3, precision=precision, every_epochs=None, every_steps=batch)
    straight = Training(rank)
    saved = []
    for number in range(1, 10):
        straight.batch(ROWS + number)
        if straight.ctx.checkpoint(model=straight.model, optimizer=straight.optimizer, step=number):
            saved.append(number)
    assert saved[0] == 6
    first = next(event for event in rank.events() if isinstance(event, events.CheckpointSaved))

    folder = str(rank.folder / "staging" / first.staging)
    again = Training(make_rank(accumulate=3, precision=precision, resume_from=folder))
    resumed = again.ctx.resume(model=again.model, optimizer=again.optimizer)
    assert resumed is not None and resumed.step == 6
    for number in range(7, 10):
        again.batch(ROWS + number)
    assert all(torch.equal(value, straight.weights()[name]) for name, value in again.weights().items())


def test_fp16_skips_a_step_with_infinite_gradients_lowers_the_scale_and_logs_it(make_rank: MakeRank) -> None:
    rank = make_rank(precision="fp16")
    training = Training(rank)
    before = training.weights()
    assert not training.batch(ROWS * float("inf"))
    assert all(torch.equal(value, before[name]) for name, value in training.weights().items())
    assert training.batch(ROWS)
    assert training.ctx._gradients.scale == 32768
    (logged,) = [event for event in rank.events() if isinstance(event, events.Metrics)]
    assert logged.values == {"train/skipped_steps": 1, "train/loss_scale": 65536}


def test_fp16_trains_as_fp32_does(make_rank: MakeRank) -> None:
    half, whole = Training(make_rank(precision="fp16")), Training(make_rank())
    assert half.model(ROWS).dtype == torch.float16
    for _ in range(5):
        half.batch(ROWS, clip=0.005)
        whole.batch(ROWS, clip=0.005)
    assert half.taken == [True] * 5
    for name, value in half.weights().items():
        torch.testing.assert_close(value, whole.weights()[name], rtol=0.02, atol=0.02)


def test_scale_changes_only_when_no_optimizer_has_gradients_of_the_old_one() -> None:
    steps = GradientSteps(torch.device("cpu"))
    steps.use("fp16", 1)
    one, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = [torch.optim.SGD([parameter], 1.0) for parameter in (one, other)]
    steps.backward(one * float("inf"))
    steps.backward(other * 0.5)
    assert [steps.step(optimizer) for optimizer in optimizers] == [False, True]
    assert (one.item(), other.item(), steps.scale) == (1.0, 0.5, 65536)
    steps.backward(other * 0.5)
    assert steps.scale == 32768


def test_gradients_that_the_user_deletes_within_a_window_are_an_error(make_rank: MakeRank) -> None:
    training = Training(make_rank(accumulate=2))
    training.batch(ROWS)
    training.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"the gradients of the last 1 batches are lost: remove"):
        training.batch(ROWS)


def test_argument_of_prepare_comes_before_the_configuration(make_rank: MakeRank) -> None:
    ctx = make_rank(accumulate=4).context
    assert ctx.accumulate == 4
    ctx.prepare(nn.Linear(1, 1), accumulate=1)
    assert ctx.accumulate == 1
    with pytest.raises(ValueError, match="accumulate is 0: it must be at least 1"):
        ctx.prepare(nn.Linear(1, 1), accumulate=0)


def test_gradients_are_averaged_also_where_only_another_rank_has_used_a_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank has used the second and the third of four parameters, with gradients 6 and 8."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(4)])
    model[0].grad, model[1].grad = torch.tensor([2.0]), torch.tensor([4.0])
    of_other_rank = iter((torch.tensor([0.0, 1.0, 1.0, 0.0]), *torch.tensor([[0.0], [6.0], [8.0]])))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(next(of_other_rank)))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    model.process_group = None  # type: ignore[assignment]  # as DDP has it
    gradients.average_gradients(model)  # type: ignore[arg-type]
    assert [parameter.grad for parameter in model.parameters()] == [1.0, 5.0, 4.0, None]
    assert next(of_other_rank, None) is None


# --- without a context ---


def weight() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(1))
    return parameter, torch.optim.SGD([parameter], 1.0)


def test_hundredth_skipped_step_in_a_row_is_an_error() -> None:
    steps = GradientSteps(CPU)
    steps.use("fp16", 1)
    parameter, optimizer = weight()
    for number in (*range(99), -1, *range(99)):
        steps.backward(parameter * (float("inf") if number >= 0 else 0.0))
        assert steps.step(optimizer) is (number < 0)
    assert steps.skipped == 198
    steps.backward(parameter * float("inf"))
    with pytest.raises(FloatingPointError, match="infinite or NaN in 100 steps in a row"):
        steps.step(optimizer)


def test_each_optimizer_has_a_window_of_its_own() -> None:
    steps = GradientSteps(CPU)
    steps.use("fp32", 2)
    (one, first), (other, second) = weight(), weight()
    taken = []
    for parameter, optimizer in ((one, first), (other, second), (one, first), (other, second)):
        steps.backward(parameter * 0.5)
        taken.append(steps.step(optimizer))
    assert taken == [False, False, True, True] and (one.item(), other.item()) == (0.5, 0.5)
    assert one.grad is None


def test_gradient_is_clipped_to_its_largest_norm() -> None:
    steps = GradientSteps(CPU)
    parameter, optimizer = weight()
    steps.backward(parameter * 8.0)
    assert steps.step(optimizer, 0.25) and parameter.item() == pytest.approx(0.75, abs=1e-4)
    steps.backward(parameter * 8.0)
    assert steps.step(optimizer) and parameter.item() == pytest.approx(-7.25, abs=1e-4)
