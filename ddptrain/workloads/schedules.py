"""The learning rate over a run, by torch's schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

_RISE = 0.3  # one_cycle: share of the run in which the rate rises (Smith and Topin, 2017: super-convergence)
_START, _END = 1 / 25, 1 / 25e4  # one_cycle: rate of the first and the last step, relative to the highest
_PATIENCE = 2  # plateau: epochs without a better loss, before the rate falls to a tenth


def make_schedule(
    name: str, optimizer: Optimizer, highest: float, done: Callable[[], float], saved: Mapping[str, Any] | None = None
) -> Any:
    """Return a scheduler of torch: one_cycle, cosine, constant, or plateau, whose step() takes the epoch's loss.

    highest: the highest learning rate. done: returns the share (0 to 1) of the run that is over, so the rate does not
    depend on the number of ranks. saved: the state of an earlier plateau.
    """
    continues = name == "plateau" and saved is not None and "num_bad_epochs" in saved
    if not continues:
        for group in optimizer.param_groups:  # a resumed run may have another rate, or had another schedule
            group["lr"] = group["initial_lr"] = highest
    if name == "plateau":
        plateau = ReduceLROnPlateau(optimizer, patience=_PATIENCE)
        if continues:
            plateau.load_state_dict(dict(saved or {}))
        return plateau
    return LambdaLR(optimizer, lambda _: rate(name, done()))


def rate(name: str, done: float) -> float:
    """Return the learning rate relative to the highest after the share `done` of the run."""
    if name == "cosine":
        return _between(1.0, 0.0, done)
    if name == "one_cycle":
        rises = done < _RISE
        return _between(_START, 1.0, done / _RISE) if rises else _between(1.0, _END, (done - _RISE) / (1 - _RISE))
    return 1.0


def _between(start: float, end: float, done: float) -> float:
    """Interpolate from start to end along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2
