"""The experiments of `make bench`, in their order."""

from __future__ import annotations

from tests.bench.experiments import checkpoint, first_step, images, restart, scale, steady
from tests.bench.measure import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    first_step.EXPERIMENT,
    restart.EXPERIMENT,
    steady.EXPERIMENT,
    checkpoint.EXPERIMENT,
    checkpoint.LARGE,
    images.EXPERIMENT,
    scale.WORKERS,
    scale.RANKS,
    scale.SLOW_LINK,
)
