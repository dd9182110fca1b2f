"""The experiments of `make bench`, in their order."""

from __future__ import annotations

from tests.bench.experiments import (
    asha,
    burst,
    checkpoint,
    clusters,
    compiled,
    first_step,
    generation,
    help_text,
    images,
    log,
    petnames,
    restart,
    scale,
    shipping,
    steady,
    sweep,
    tracking,
)
from tests.bench.measure import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    help_text.EXPERIMENT,
    first_step.EXPERIMENT,
    clusters.UP,
    clusters.GANGS,
    restart.EXPERIMENT,
    compiled.EXPERIMENT,
    scale.EXPERIMENT,
    scale.WORKERS,
    shipping.EXPERIMENT,
    log.EXPERIMENT,
    steady.EXPERIMENT,
    petnames.EXPERIMENT,
    checkpoint.EXPERIMENT,
    checkpoint.LARGE,
    generation.EXPERIMENT,
    burst.EXPERIMENT,
    sweep.EXPERIMENT,
    asha.EXPERIMENT,
    tracking.EXPERIMENT,
    images.FEEDING,
    images.LISTING,
    images.GPU,
)
