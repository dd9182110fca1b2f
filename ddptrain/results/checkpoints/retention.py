"""Decides which checkpoint of a run is the best one, and which are deleted when there is a new one: pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddptrain.results.run_record import BestRecord


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """How many checkpoints are kept besides the best one; the metric that decides which is best, and its direction.

    ignore_nan: metrics may be NaN or infinite; only the weights must be finite.
    """

    keep: int = 3
    metric: str | None = "val/loss"
    mode: Literal["min", "max"] = "min"
    ignore_nan: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to choose from: its step, its metrics, and whether it is finite (see `are_finite`)."""

    step: int
    metrics: Mapping[str, float]
    finite: bool = True


def are_finite(metrics: Mapping[str, float], policy: CheckpointPolicy) -> bool:
    """Return whether the metrics of a checkpoint show a model that has not diverged.

    If the policy's metric is among them, that one and the losses count: another one may be NaN for a good reason, such
    as the AUC of an epoch without positive samples. Otherwise all count.
    """
    if policy.ignore_nan:
        return True
    all_count = policy.metric not in metrics
    counted = (value for name, value in metrics.items() if all_count or name == policy.metric or "loss" in name)
    return all(map(math.isfinite, counted))


def best_checkpoint(saved: Sequence[Saved], policy: CheckpointPolicy) -> BestRecord | None:
    """Return the best checkpoint, of equal ones the last; None if none has a finite value of the policy's metric.

    saved: in the order of saving. A checkpoint that is not finite is chosen only if no other one has the metric.
    """
    if policy.metric is None:
        return None
    values = [(each, value) for each in saved if math.isfinite(value := each.metrics.get(policy.metric, math.nan))]
    finite = [pair for pair in values if pair[0].finite] or values
    if not finite:
        return None
    # Of equal values, max() and min() return the first one.
    best, value = (max if policy.mode == "max" else min)(reversed(finite), key=lambda pair: pair[1])
    return BestRecord(policy.metric, policy.mode, value, best.step)


def superseded(saved: Sequence[Saved], best: BestRecord | None, policy: CheckpointPolicy) -> list[int]:
    """Return the steps of the checkpoints that are deleted, oldest first: neither new, nor the best or last finite one.

    saved: in the order of saving.
    """
    kept = {each.step for each in saved[-policy.keep :]} | {best.step if best is not None else None}
    kept.add(next((each.step for each in reversed(saved) if each.finite), None))
    return [each.step for each in saved if each.step not in kept]
