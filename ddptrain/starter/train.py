"""Trains a model to classify points of two spirals. Replace it with your own. To run it: ddptrain train train.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from ddptrain import RankContext


def train(ctx: RankContext, epochs: int = 20, batch_size: int = 64, lr: float = 0.01, hidden: int = 64) -> None:
    """Train the model. Runs in each rank: one process per GPU (or on the CPU). The process group is initialized."""
    torch.manual_seed(ctx.rank)  # all ranks get rank 0's weights; dropout would differ on each
    layers = [nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)]
    model = ctx.prepare(nn.Sequential(*layers))  # on this rank's device, in DistributedDataParallel
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    points, labels = spirals(5120)
    training = ctx.loader(TensorDataset(points[:4096], labels[:4096]), batch_size=batch_size)  # this rank's share
    validation = ctx.loader(TensorDataset(points[4096:], labels[4096:]), batch_size=256, shuffle=False)

    resumed = ctx.resume(model=model, optimizer=optimizer)  # None without a checkpoint
    step = resumed.step if resumed else 0
    for epoch in ctx.epochs(epochs):  # those that are left
        losses = []
        model.train()
        for x, y in training:
            loss = binary_cross_entropy_with_logits(model(x.to(ctx.device)).squeeze(1), y.to(ctx.device))
            ctx.backward(loss)  # these two follow `prepare:` in train.yaml: precision, several batches for a step
            if ctx.step(optimizer):
                step += 1
            losses.append(loss.detach())
            ctx.progress(round(training.position * len(training)), epochs * len(training), unit="batches")
        # All ranks must call ctx.mean and ctx.checkpoint; `checkpoint:` in train.yaml says how often it saves.
        metrics = {"train/loss": ctx.mean(torch.stack(losses)), **validate(ctx, model, validation)}
        ctx.log(metrics, step=step, epoch=epoch)
        ctx.checkpoint(model=model, optimizer=optimizer, step=step, epoch=epoch, metrics=metrics, last=epoch == epochs)


def validate(ctx: RankContext, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the loss and the accuracy of the model: means over the validation data of all ranks."""
    model.eval()
    losses, hits = [], []
    with torch.no_grad():
        for x, y in batches:
            scores, labels = model(x.to(ctx.device)).squeeze(1), y.to(ctx.device)
            losses.append(binary_cross_entropy_with_logits(scores, labels, reduction="none"))
            hits.append(((scores > 0) == (labels > 0.5)).float())
    count = sum(map(len, hits))  # ranks may have different numbers of points
    return {"val/loss": ctx.mean(torch.cat(losses), count), "val/accuracy": ctx.mean(torch.cat(hits), count)}


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Return random points on two spirals [count, 2], and the label (0 or 1) of each point's spiral [count]."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.rand(count, generator=generator).sqrt() * 3 * math.pi
    label = torch.randint(2, (count,), generator=generator)
    angle = turn + math.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 10
    return points + 0.02 * torch.randn(count, 2, generator=generator), label.float()
