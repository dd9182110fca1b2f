"""The optimizer and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddptrain.workloads.images.params import ImagesParams

# one_cycle as in torch's OneCycleLR (Smith and Topin, 2017: super-convergence).
_RISE = 0.3  # share of the run in which the rate rises
_START, _END = 1 / 25, 1 / 25e4  # rate of the first and the last step, relative to the highest
_MOMENTA = (0.95, 0.85)  # at both ends, and at the highest rate


def highest_rate(settings: ImagesParams, world_size: int) -> float:
    """Return the highest learning rate: base_lr, multiplied by the number of ranks with scale_lr."""
    return settings.base_lr * (world_size if settings.scale_lr else 1)


def make_optimizer(settings: ImagesParams, parameters: Iterable[Tensor], learning_rate: float) -> Optimizer:
    """Return the optimizer that params.optimizer selects."""
    if settings.optimizer == "sgd":
        return SGD(
            parameters, learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True
        )
    kind = AdamW if settings.optimizer == "adamw" else Adam
    return kind(
        parameters,
        learning_rate,
        betas=(settings.momentum, 0.999),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


class Schedule:
    """Sets the optimizer's learning rate before each step.

    Except for `plateau`, the rate is a function of the progress, so a resumed run needs no state. The state of
    `plateau` is in the checkpoint, and its current rate in the state of the optimizer.
    """

    def __init__(self, settings: ImagesParams, optimizer: Optimizer, highest: float) -> None:
        self._settings, self._optimizer, self._highest = settings, optimizer, highest
        self._plateau = (
            ReduceLROnPlateau(optimizer, factor=settings.gamma, patience=settings.patience)
            if settings.scheduler == "plateau"
            else None
        )

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def before_step(self, epochs: float, steps_per_epoch: int) -> None:
        """Set the rate of the step after `epochs` epochs."""
        if self._plateau is not None:
            return
        settings = self._settings
        factor = rate_factor(settings, epochs, steps_per_epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._highest * factor
        if settings.scheduler == "one_cycle":
            self._set_momentum(_one_cycle(epochs * steps_per_epoch, settings.epochs * steps_per_epoch)[1])

    def after_validation(self, loss: float) -> str:
        """Update `plateau` with val/loss; return a message if the rate was lowered, else ""."""
        if self._plateau is None:
            return ""
        before = self.learning_rate
        self._plateau.step(loss)
        if self.learning_rate == before:
            return ""
        return f"val/loss has not improved: the learning rate goes from {before:g} to {self.learning_rate:g}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return dict(self._plateau.state_dict()) if self._plateau is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; the state of another kind of schedule is ignored."""
        if self._plateau is not None and state:
            self._plateau.load_state_dict(
                {**state, "factor": self._settings.gamma, "patience": self._settings.patience}
            )

    def _set_momentum(self, momentum: float) -> None:
        for group in self._optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum


def rate_factor(settings: ImagesParams, epochs: float, steps_per_epoch: int) -> float:
    """Return the learning rate of the step after `epochs` epochs, relative to the highest (0 to 1)."""
    if settings.scheduler == "one_cycle":
        return _one_cycle(epochs * steps_per_epoch, settings.epochs * steps_per_epoch)[0]
    if settings.scheduler == "cosine":
        return _between(1.0, 0.0, epochs / settings.epochs)
    if settings.scheduler == "step":
        falls = math.floor(epochs + 1e-6) // settings.step_size  # rounding: fractions of epochs may sum to less
        return float(settings.gamma**falls)
    return 1.0


def _one_cycle(step: float, steps: float) -> tuple[float, float]:
    """Return the rate relative to the highest, and the momentum, at a step, counted from 0."""
    top = max(_RISE * steps - 1, 0.0)
    calm, fast = _MOMENTA
    if step < top:
        return _between(_START, 1.0, step / top), _between(calm, fast, step / top)
    done = (step - top) / max(steps - 1 - top, 1e-9)
    return _between(1.0, _END, done), _between(fast, calm, done)


def _between(start: float, end: float, done: float) -> float:
    """Interpolate from start to end along half a cosine; `done` is 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2
