"""Gradient accumulation and the gradient scaler of fp16: the implementation of ctx.backward and ctx.step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_MAX_SKIPPED = 100  # steps in a row, which reduce the loss scale from 65536 to 5e-26


class GradientSteps:
    """Sums up the gradients of `accumulate` micro-batches, and takes the steps of the optimizers.

    DDP averages the gradients over the ranks only in the last micro-batch of a window. A window also ends with the last
    batch of an epoch (`is_last_batch`); the gradient is the mean over the micro-batches of the window.
    """

    def __init__(self, device: torch.device, *, is_last_batch: Callable[[], bool] = lambda: False) -> None:
        self.accumulate = 1
        self.skipped = 0  # steps that were not taken because a gradient was infinite or NaN
        self._device = device
        self._is_last_batch = is_last_batch
        self._scaler: torch.amp.GradScaler | None = None
        self._scale_is_due = False
        self._skipped_in_a_row = 0
        self._done: dict[Optimizer, int] = {}  # the calls of ctx.step in the window of each optimizer
        # Models whose last gradients were not averaged over the ranks. A set would have another order on each rank.
        self._unsynced: dict[DistributedDataParallel, None] = {}

    @property
    def scale(self) -> float:
        """The factor of the loss: 1 without a gradient scaler. Reading it waits for the device."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def use(self, precision: str, accumulate: int) -> None:
        """Set the size of a window, and create the scaler for fp16. Raises ValueError if `accumulate` is below 1."""
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate!r}: it must be at least 1")
        self.accumulate = accumulate
        if precision == "fp16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(self._device.type)

    def attach(self, model: nn.Module) -> None:
        """Make DDP average the gradients only in the last micro-batch of a window."""
        if self.accumulate > 1 and isinstance(model, DistributedDataParallel):
            model.register_forward_pre_hook(self._choose_sync)

    def _choose_sync(self, model: nn.Module, _inputs: Any) -> None:
        """Choose whether DDP averages the gradients. Runs before each forward pass, in which DDP reads the setting."""
        assert isinstance(model, DistributedDataParallel)
        if not torch.is_grad_enabled():
            return
        own = (done for optimizer, done in self._done.items() if _optimizes(optimizer, model))
        syncs = next(own, 0) + 1 >= self.accumulate or self._is_last_batch()
        model.require_backward_grad_sync = syncs
        self._unsynced.pop(model, None)
        if not syncs:
            self._unsynced[model] = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss. Raises RuntimeError if the earlier gradients of the window were deleted."""
        for optimizer, done in self._done.items():
            if done and all(parameter.grad is None for parameter in _parameters(optimizer)):
                raise RuntimeError(
                    f"the gradients of the last {done} batches are lost: remove optimizer.zero_grad(), because "
                    "ctx.step calls it after each step of the optimizer"
                )
        self._update_scale()
        (self._scaler.scale(loss) if self._scaler is not None else loss).backward()

    def step(self, optimizer: Optimizer, clip: float | None = None, *, last: bool = False) -> bool:
        """Count a micro-batch; at the end of a window take a step. Return whether the optimizer took a step.

        Raises FloatingPointError if a gradient was infinite or NaN in 100 steps in a row.
        """
        done = self._done[optimizer] = self._done.get(optimizer, 0) + 1
        if done < self.accumulate and not last and not self._is_last_batch():
            return False
        parameters = _parameters(optimizer)
        for model in [each for each in self._unsynced if _optimizes(optimizer, each)]:
            average_gradients(model)
            del self._unsynced[model]
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if done > 1 and self.accumulate > 1 and gradients:
            torch._foreach_div_(gradients, float(done))
        self._done[optimizer] = 0
        is_finite = self._scaler is None or bool(nn.utils.get_total_norm(gradients).isfinite())
        if clip is not None and is_finite:
            nn.utils.clip_grad_norm_(parameters, clip)
        if self._scaler is not None:
            self._scaler.step(optimizer)
            self._scale_is_due = True
        else:
            optimizer.step()
        optimizer.zero_grad()
        self._count_skipped(is_finite=is_finite)
        return is_finite

    def _count_skipped(self, *, is_finite: bool) -> None:
        self._skipped_in_a_row = 0 if is_finite else self._skipped_in_a_row + 1
        self.skipped += int(not is_finite)
        if self._skipped_in_a_row >= _MAX_SKIPPED:
            raise FloatingPointError(
                f"the gradients were infinite or NaN in {_MAX_SKIPPED} steps in a row: lower the learning rate, or "
                "set precision: bf16 (or fp32)"
            )

    def _update_scale(self) -> None:
        """Update the loss scale when no optimizer has gradients that were computed with the old scale."""
        if self._scaler is not None and self._scale_is_due and self.is_whole:
            self._scaler.update()
            self._scale_is_due = False

    # --- checkpoints ---

    @property
    def is_whole(self) -> bool:
        """Whether no optimizer is within its window, so that a checkpoint needs no gradients."""
        return not any(self._done.values())

    def state(self) -> dict[str, Any] | None:
        """Return the state of the scaler for a checkpoint; None without a scaler."""
        self._update_scale()
        return {"scaler": self._scaler.state_dict(), "skipped": self.skipped} if self._scaler is not None else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue with the state of a checkpoint, before the first call of `step`."""
        state = state or {}
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(dict(state["scaler"]))
        self.skipped = state.get("skipped", 0)


def average_gradients(model: DistributedDataParallel) -> None:
    """Replace the gradients of a model by their mean over the ranks. All ranks must call it."""
    group = model.process_group
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    present = torch.tensor([float(parameter.grad is not None) for parameter in parameters]).to(parameters[0].device)
    dist.all_reduce(present, group=group)
    for parameter, count in zip(parameters, present.tolist(), strict=True):
        if not count:
            continue  # no rank has used the parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizes(optimizer: Optimizer, model: nn.Module) -> bool:
    ids = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in ids for parameter in _parameters(optimizer))
