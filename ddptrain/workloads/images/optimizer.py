"""The optimizer, and its learning rate over a run: by the step alone, or by what the validation has shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddptrain.workloads.images.params import ImagesParams

# one_cycle, as torch's OneCycleLR has it (Smith and Topin, 2017: super-convergence).
_RISE = 0.3  # the part of the run in which the rate rises
_START, _END = 1 / 25, 1 / 25e4  # the rate at the first and the last step, as shares of the highest
_MOMENTA = (0.95, 0.85)  # at the ends, and at the highest rate


def highest_rate(settings: ImagesParams, world_size: int) -> float:
    """The highest learning rate: base_lr, times the number of ranks on request."""
    return settings.base_lr * (world_size if settings.scale_lr else 1)


def make_optimizer(settings: ImagesParams, parameters: Iterable[Tensor], learning_rate: float) -> Optimizer:
    """What params.optimizer names."""
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

    All kinds but plateau follow from how much is done, so that a resumed run just goes on; the state of plateau is in
    the checkpoint, and the rate itself in the optimizer's.
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
        """The one of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def before_step(self, epochs: float, steps_per_epoch: int) -> None:
        """For the step that follows after so many epochs."""
        if self._plateau is not None:
            return
        settings = self._settings
        factor = rate_factor(settings, epochs, steps_per_epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._highest * factor
        if settings.scheduler == "one_cycle":
            self._set_momentum(_one_cycle(epochs * steps_per_epoch, settings.epochs * steps_per_epoch)[1])

    def after_validation(self, loss: float) -> str:
        """Takes note of val/loss; returns a line to tell where it has lowered the learning rate, else ""."""
        if self._plateau is None:
            return ""
        before = self.learning_rate
        self._plateau.step(loss)
        if self.learning_rate == before:
            return ""
        return f"val/loss has not improved: the learning rate goes from {before:g} to {self.learning_rate:g}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return dict(self._plateau.state_dict()) if self._plateau is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, unless it is of another kind of schedule: then it begins afresh."""
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
    """The share (0 to 1) of the highest learning rate for the step that follows after so many epochs."""
    if settings.scheduler == "one_cycle":
        return _one_cycle(epochs * steps_per_epoch, settings.epochs * steps_per_epoch)[0]
    if settings.scheduler == "cosine":
        return _between(1.0, 0.0, epochs / settings.epochs)
    if settings.scheduler == "step":
        falls = math.floor(epochs + 1e-6) // settings.step_size  # shares of epochs may add up to a little less
        return float(settings.gamma**falls)
    return 1.0


def _one_cycle(step: float, steps: float) -> tuple[float, float]:
    """Share of the highest rate, and momentum, at a step of so many, counted from 0."""
    top = max(_RISE * steps - 1, 0.0)
    calm, fast = _MOMENTA
    if step < top:
        return _between(_START, 1.0, step / top), _between(calm, fast, step / top)
    done = (step - top) / max(steps - 1 - top, 1e-9)
    return _between(1.0, _END, done), _between(fast, calm, done)


def _between(start: float, end: float, done: float) -> float:
    """From start to end along half a cosine, by the share that is done."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2
