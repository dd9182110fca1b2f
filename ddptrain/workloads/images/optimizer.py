"""The optimizer and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddptrain.workloads.images.params import ImagesParams

# one_cycle as in torch's OneCycleLR (Smith and Topin, 2017: super-convergence).
_RISE = 0.3  # share of the run in which the rate rises
_START, _END = 1 / 25, 1 / 25e4  # rate of the first and the last step, relative to the highest
_MOMENTUM, _EPSILON = 0.9, 1e-6
_MOMENTA = (0.95, 0.85)  # at both ends, and at the highest rate


def make_optimizer(settings: ImagesParams, parameters: Iterable[Tensor]) -> Optimizer:
    """Return the optimizer that params.optimizer selects."""
    if settings.optimizer == "sgd":
        return SGD(parameters, settings.base_lr, momentum=_MOMENTUM, weight_decay=settings.weight_decay, fused=True)
    kind = AdamW if settings.optimizer == "adamw" else Adam
    return kind(
        parameters,
        settings.base_lr,
        betas=(_MOMENTUM, 0.999),
        eps=_EPSILON,
        weight_decay=settings.weight_decay,
        fused=True,
    )


class Schedule:
    """Sets the optimizer's learning rate before each step: a function of the progress, so that it has no state."""

    def __init__(self, settings: ImagesParams, optimizer: Optimizer) -> None:
        self._settings, self._optimizer = settings, optimizer

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def before_step(self, epochs: float, steps_per_epoch: int) -> None:
        """Set the rate of the step after `epochs` epochs."""
        settings = self._settings
        factor = rate_factor(settings, epochs, steps_per_epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.base_lr * factor
        if settings.scheduler == "one_cycle":
            self._set_momentum(_one_cycle(epochs * steps_per_epoch, settings.epochs * steps_per_epoch)[1])

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
