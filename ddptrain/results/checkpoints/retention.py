"""Decides which checkpoint of a run is the best one, and which are deleted when there is a new one: pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddptrain.results.run_record import BestRecord


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """How many checkpoints are kept besides the best one; the metric that decides which is best, and its direction."""

    keep: int = 3
    metric: str | None = "val/loss"
    mode: Literal["min", "max"] = "min"


def best_checkpoint(metrics: Mapping[int, Mapping[str, float]], policy: CheckpointPolicy) -> BestRecord | None:
    """Return the best checkpoint, of equal ones the first; None if none has a finite value of the policy's metric.

    metrics: those of each checkpoint by its step, in the order of saving.
    """
    if policy.metric is None:
        return None
    values = ((of_step.get(policy.metric), step) for step, of_step in metrics.items())
    candidates = [(value, step) for value, step in values if value is not None and math.isfinite(value)]
    if not candidates:
        return None
    # Of equal values, max() and min() return the first one.
    value, step = (max if policy.mode == "max" else min)(candidates, key=lambda pair: pair[0])
    return BestRecord(policy.metric, policy.mode, value, step)


def superseded(steps: Sequence[int], best: BestRecord | None, policy: CheckpointPolicy) -> list[int]:
    """Return the steps of the checkpoints that are deleted, oldest first. steps: in the order of saving."""
    return [step for step in steps[: -policy.keep] if best is None or step != best.step]
