"""How good a model is on the images that are held out, exact over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.workloads.images.loader.loader import Batch

# (index [n], class [n], output [n], probability [n]) of the images of a batch, all on the device.
Keep = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Score:
    """Means over the n images of all ranks: the loss in nats, and how often the right class is first, or in the top 5.

    All are NaN where there was no image.
    """

    loss: float
    accuracy: float
    top5: float
    n: int

    def metrics(self) -> dict[str, float]:
        """As they are logged."""
        return {"val/loss": self.loss, "val/accuracy": self.accuracy, "val/top5": self.top5}


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    pixels: nn.Module,
    batches: Iterable[Batch],
    outputs: Tensor,
    keep: Keep | None = None,
    seen: Callable[[], None] = lambda: None,
) -> Score:
    """The score of a model on the batches of all ranks, which all call this, however many batches each has.

    `pixels` makes of a batch's bytes what the model reads; `outputs`, on the device, is the model's output for each
    class. Images that could not be had don't count. `keep` is given what is predicted; `seen` is called after each
    batch, as a sign of life.
    """
    was_training = model.training
    model.eval()
    device = outputs.device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in batches:
        seen()
        if batch.n_counted == 0:
            continue
        ok = batch.ok.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        logits = model(pixels(batch.images)).float()
        sums += _sums(logits, outputs[labels], ok)
        if keep is not None:
            probability, output = functional.softmax(logits, 1).max(1)
            shown = batch.ok
            keep(batch.index[shown], labels[ok], output[ok], probability[ok])
    model.train(was_training)
    dist.all_reduce(sums)
    loss_sum, hits, hits5, n = sums.tolist()
    nan = float("nan")
    return Score(loss_sum / n, hits / n, hits5 / n, int(n)) if n else Score(nan, nan, nan, 0)


def share_buffers(model: nn.Module) -> None:
    """Every rank takes over rank 0's buffers, BatchNorm's means: those that a checkpoint holds."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def _sums(logits: Tensor, targets: Tensor, ok: Tensor) -> Tensor:
    """Of the images that are ok: summed loss, hits, hits among the first 5, and their number."""
    losses = functional.cross_entropy(logits, targets, reduction="none")
    first = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    each = torch.stack([losses, first[:, 0], first.any(1), torch.ones_like(losses)]).double()
    return torch.where(ok, each, 0.0).sum(1)
