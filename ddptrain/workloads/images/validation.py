"""Validation of the image classifier, exact over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.bad_images import check_bad
from ddptrain.workloads.images.loader.batcher import Batch
from ddptrain.workloads.images.loader.image_loader import ImageLoader

# Receives the index [n], label [n], predicted output [n] and probability [n] of the images of a batch, on the device.
OnPredictions = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class ValidationScore:
    """Means over the n images of all ranks: loss in nats, and how often the right class is first, or among the first 5.

    All means are NaN if there are no images.
    """

    loss: float
    accuracy: float
    top5: float
    n: int

    def metrics(self) -> dict[str, float]:
        """Return the values under the names that are logged."""
        return {"val/loss": self.loss, "val/accuracy": self.accuracy, "val/top5": self.top5}


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    pixels: nn.Module,
    batches: Iterable[Batch],
    outputs: Tensor,
    keep: OnPredictions | None = None,
    seen: Callable[[], None] = lambda: None,
) -> ValidationScore:
    """The score of a model on the batches of all ranks. All ranks must call it; each may have any number of batches.

    pixels: converts the bytes of a batch to the model's input.
    outputs: int64 [classes], on the device: the model's output for each class.
    keep: receives the predictions.
    seen: is called after each batch, to report activity to the watchdog.

    Unreadable images do not count.
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
    return ValidationScore(loss_sum / n, hits / n, hits5 / n, int(n)) if n else ValidationScore(nan, nan, nan, 0)


def share_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 (BatchNorm statistics), which a checkpoint contains, to all ranks."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def check_bad_on_all_ranks(loader: ImageLoader, manifest: Manifest, most_bad: float, device: torch.device) -> None:
    """Check the share of unreadable images of all ranks. All ranks must call it. Raises TooManyBadImages on each."""
    is_bad = torch.zeros(len(manifest.keys), dtype=torch.uint8)
    is_bad[loader.bad_index] = 1
    is_bad = is_bad.to(device)
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    reasons = dict(loader.bad)
    names = [manifest.name(index) for index in is_bad.nonzero().flatten().tolist()]
    named = {name: reasons.get(name, "see the logs of the other ranks") for name in names}
    check_bad(len(names), len(manifest.train) + len(manifest.val), most_bad, named)


def _sums(logits: Tensor, targets: Tensor, ok: Tensor) -> Tensor:
    """Return sums over the images that are ok: loss, hits, hits among the first 5, and the number of images."""
    losses = functional.cross_entropy(logits, targets, reduction="none")
    first = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    per_image = torch.stack([losses, first[:, 0], first.any(1), torch.ones_like(losses)]).double()
    return torch.where(ok, per_image, 0.0).sum(1)
