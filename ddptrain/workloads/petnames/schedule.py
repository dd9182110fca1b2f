"""How the learning rate changes over a run: a function of the step alone, so that a resumed run just goes on."""

from __future__ import annotations

import math

_RISE = 0.3  # one_cycle: the part of the run in which the rate rises (Smith and Topin, 2017: super-convergence)
_START = 0.04  # one_cycle: the rate at the first step, as a share of the highest


def learning_rate_factor(schedule: str, done: float, total: float) -> float:
    """The share (0 to 1) of the highest learning rate that a step takes after `done` of `total` steps, or epochs."""
    done = min(1.0, done / total)
    if schedule == "cosine":
        return _falling(done)
    if schedule == "one_cycle":
        return (
            _START + (1 - _START) * _falling(1 - done / _RISE)
            if done < _RISE
            else _falling((done - _RISE) / (1 - _RISE))
        )
    return 1.0


def _falling(done: float) -> float:
    """Half a cosine, from 1 at 0 to 0 at 1."""
    return (1 + math.cos(math.pi * done)) / 2
