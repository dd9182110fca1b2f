"""Training metrics. They are summed on the device and read rarely, because each read waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddptrain.rank.context import RankContext

_STEPS_PER_READING = 10  # on a GPU


class Meter:
    """Logs loss, hits and learning rate of each step, several steps at a time; sums them over this rank's epoch."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        # Steps that are not logged yet: step, epoch, learning rate, number of images, sums.
        self._waiting: list[tuple[int, float, float, int, Tensor]] = []
        self._most_waiting = _STEPS_PER_READING if ctx.device.type == "cuda" else 1
        self._sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
        self._n = 0

    def add(self, step: int, epoch: float, learning_rate: float, sums: Tensor, n: int) -> None:
        """Add a step with n images of this rank; sums: [2], their summed loss and number of hits."""
        if n == 0:
            return
        self._sums += sums
        self._n += n
        self._waiting.append((step, epoch, learning_rate, n, sums))
        if len(self._waiting) >= self._most_waiting:
            self.flush()

    def flush(self) -> None:
        """Log the steps that were added since the last flush."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        read = torch.stack([sums for *_, sums in waiting]).tolist()
        for (step, epoch, learning_rate, n, _), (loss_sum, hits) in zip(waiting, read, strict=True):
            values = {"train/loss": loss_sum / n, "train/correct": hits / n, "train/learning_rate": learning_rate}
            self._ctx.log(values, step=step, epoch=epoch)

    def epoch_means(self) -> tuple[float, float]:
        """Return the mean loss and the share of hits in the epoch so far, over all ranks. All ranks must call it."""
        self.flush()
        totals = torch.cat([self._sums, self._sums.new_tensor([self._n])])
        dist.all_reduce(totals)
        loss_sum, hits, n = totals.tolist()
        return loss_sum / max(1, n), hits / max(1, n)

    def reset(self) -> None:
        """Start a new epoch."""
        self._sums.zero_()
        self._n = 0

    def state(self) -> dict[str, Any]:
        """Return the sums of this rank, for a checkpoint within an epoch."""
        return {"sums": self._sums, "n": self._n}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the sums of a checkpoint."""
        self._sums.copy_(state["sums"])
        self._n = int(state["n"])
