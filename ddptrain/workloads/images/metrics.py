"""What the steps show: loss and hits, summed on the device, and read seldom, as each reading waits for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_STEPS_PER_READING = 10  # on a GPU


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is not logged yet; sums: the summed loss and the hits, on the device."""

    step: int
    epoch: float
    learning_rate: float
    n: int
    sums: Tensor


class Meter:
    """Logs loss, hits and learning rate of every step, a few steps at a time; and sums up an epoch of this rank."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._waiting: list[_Step] = []
        self._most_waiting = _STEPS_PER_READING if ctx.device.type == "cuda" else 1
        self._sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
        self._n = 0

    def add(self, step: int, epoch: float, learning_rate: float, sums: Tensor, n: int) -> None:
        """A step with n images of this rank; sums: [2], their summed loss and the number of hits.

        Raises: FloatingPointError where the loss of a step is no longer a number.
        """
        if n == 0:
            return
        self._sums += sums
        self._n += n
        self._waiting.append(_Step(step, epoch, learning_rate, n, sums))
        if len(self._waiting) >= self._most_waiting:
            self.flush()

    def flush(self) -> None:
        """Log the steps that wait. Raises: FloatingPointError, as `add` does."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for one, (loss_sum, hits) in zip(waiting, torch.stack([one.sums for one in waiting]).tolist(), strict=True):
            values = {
                "train/loss": loss_sum / one.n,
                "train/correct": hits / one.n,
                "train/learning_rate": one.learning_rate,
            }
            self._ctx.log(values, step=one.step, epoch=one.epoch)
            if not math.isfinite(loss_sum):
                raise FloatingPointError(
                    f"train/loss is {loss_sum / one.n} in step {one.step}: lower params.base_lr, or set "
                    "params.precision: fp32"
                )

    def epoch_means(self) -> tuple[float, float]:
        """Loss and share of hits of the epoch so far, over the images of all ranks, which all call this."""
        self.flush()
        totals = torch.cat([self._sums, self._sums.new_tensor([self._n])])
        dist.all_reduce(totals)
        loss_sum, hits, n = totals.tolist()
        return loss_sum / max(1, n), hits / max(1, n)

    def restart(self) -> None:
        """A new epoch begins."""
        self._sums.zero_()
        self._n = 0

    def state(self) -> dict[str, Any]:
        """The sums of this rank, for a checkpoint in mid epoch."""
        return {"sums": self._sums, "n": self._n}

    def go_on(self, state: dict[str, Any]) -> None:
        """Take up the sums of a checkpoint."""
        self._sums.copy_(state["sums"])
        self._n = int(state["n"])
