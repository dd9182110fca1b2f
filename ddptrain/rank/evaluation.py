"""Scores checkpoints on all ranks: the code that a rank executes in an evaluation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import shorten
from ddptrain.rank.entrypoint import load_function
from ddptrain.rank.failure import shortened, user_traceback
from ddptrain.rank.output import number

if TYPE_CHECKING:
    import torch

    from ddptrain.rank.context import RankContext


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint to evaluate: `path` is its folder on this host. Loading it executes no pickle.

    name: the name in the list of scores, such as petnames@champion. step, epoch, metrics: as they were saved.
    params: the parameters of the workload, from the configuration. data: the source given with --data, or None.
    compared: all checkpoints of this evaluation, this one included, by name. notes: remarks to show with the scores.
    """

    name: str
    path: Path
    step: int
    epoch: float | None
    metrics: Mapping[str, float]
    params: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    compared: Mapping[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def weights(self, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Return the tensors of the model, by name."""
        from ddptrain.rank.checkpoint.weights import read_weights

        return read_weights(self.path, device)

    def load(self, model: torch.nn.Module, device: str | torch.device = "cpu") -> None:
        """Load the weights into a model, which may be wrapped in DDP, and set it to eval mode.

        Raises RuntimeError, which lists missing and unexpected names, if they do not fit.
        """
        import torch

        from ddptrain.rank.checkpoint.files import read

        read(self.path, model, None, torch.device(device))
        model.eval()

    def state(self) -> dict[str, Any]:
        """Return what was saved besides the weights: step, epoch, metrics, and in "extra" the workload's own data."""
        from ddptrain.rank.checkpoint.files import read_state

        return read_state(self.path)


_MAX_REASON_CHARS = 300
_TOLERANCE = 1e-3  # relative; sums on GPUs are not exactly equal

Evaluate = Callable[["RankContext", SavedCheckpoint], Any]


def evaluate(
    ctx: RankContext, function: str, targets: list[dict[str, Any]], params: dict[str, Any], data: str | None = None
) -> dict[str, Any]:
    """Score checkpoints with the same function on the same data; return the scores of rank 0, failures and notes.

    NaN and infinities become text, because JSON has no such numbers. A failure of the first checkpoint ends the run; of
    any other checkpoint, the reason is in `failures`.

    Raises TypeError or ValueError if the function does not return numbers by name, or ranks return different numbers.
    """
    score: Evaluate = load_function(function)
    compared = {each["name"]: Path(each["folder"]) for each in targets}
    shared: dict[str, Any] = {"params": params, "data": data, "compared": compared}
    checkpoints = [
        SavedCheckpoint(each["name"], compared[each["name"]], each["step"], each["epoch"], each["metrics"], **shared)
        for each in targets
    ]
    scores: dict[str, dict[str, float | str]] = {}
    failures: dict[str, str] = {}
    for position, checkpoint in enumerate(checkpoints):
        metrics, reason = _scored(ctx, score, checkpoint, required=position == 0)
        if reason:
            failures[checkpoint.name] = reason
            continue
        finite = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        scores[checkpoint.name] = finite
        if ctx.rank == 0:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print(f"{checkpoint.name}: {shown}", flush=True)
    notes = list(dict.fromkeys(note for checkpoint in checkpoints for note in checkpoint.notes))
    return {"scores": scores, "failures": failures, "notes": notes}


def checked_metrics(value: Any) -> dict[str, float]:
    """Return the result of an evaluation as numbers by name; NaN and infinities stay. Raises TypeError, ValueError."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"the function that evaluates returned {type(value).__name__} {str(value)[:80]!r}: it must return a dict "
            "of numbers, as {'val/loss': 2.1}"
        )
    metrics = {}
    for name, each in value.items():
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise TypeError(f"the function that evaluates returned a metric named {name!r}: a name is text")
        try:
            metrics[name] = float(number(name, each))
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
            raise TypeError(
                f"the function that evaluates returned {str(each)[:80]!r} ({type(each).__name__}) for {name!r}: "
                "a metric is one number"
            ) from None
    return metrics


def _scored(
    ctx: RankContext, score: Evaluate, checkpoint: SavedCheckpoint, *, required: bool
) -> tuple[dict[str, float], str]:
    """Return the metrics of a checkpoint and "", or {} and why there are none: the same case on all ranks."""
    metrics: dict[str, float] = {}
    reason = ""
    try:
        returned = score(ctx, checkpoint)
        metrics = checked_metrics(returned) if returned is not None or ctx.rank == 0 else {}
    except Exception as error:  # the user's code, or another architecture; continue with other checkpoints
        if required:
            raise
        reason = f"{type(error).__name__}: {shorten(' '.join(str(error).split()), _MAX_REASON_CHARS)}"
        print(shortened(user_traceback(error)), end="", file=sys.stderr)
    if required:
        _require_equal(ctx, metrics)
        return metrics, ""
    # A rank that fails waits here. If other ranks are in a collective operation, the driver notices and ends the run.
    if ctx.mean(float(bool(reason))):
        return {}, reason or "it failed on another rank: see the logs of the ranks"
    _require_equal(ctx, metrics)
    return metrics, ""


def _require_equal(ctx: RankContext, metrics: Mapping[str, float]) -> None:
    """Raise ValueError if the ranks return different numbers. Ranks that return none are ignored."""
    total = math.fsum(value for value in metrics.values() if math.isfinite(value))
    mean = ctx.mean(total, weight=float(bool(metrics)))
    differs = bool(metrics) and abs(total - mean) > _TOLERANCE * max(1.0, abs(total))
    if ctx.mean(float(differs)):
        raise ValueError(
            f"rank {ctx.rank} returns {dict(metrics)}, other ranks return other numbers: take the mean over all ranks, "
            "as ctx.mean(loss, weight=number_of_samples)"
        )
