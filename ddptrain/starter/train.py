"""Trains a model to classify points of two spirals. Replace it with your own. To run it: ddptrain train train.yaml."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddptrain import RankContext


def train(ctx: RankContext, epochs: int = 20, batch_size: int = 64, lr: float = 0.01, hidden: int = 64) -> None:
    """Train the model. Runs in each rank: one process per GPU (or on the CPU). The process group is initialized."""
    torch.manual_seed(0)  # the same model on every rank
    layers = [nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(ctx.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    data = TensorDataset(*spirals(4096))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)  # each rank has its own share
    loader = DataLoader(data, batch_size, sampler=sampler)

    resumed = ctx.resume(model=model, optimizer=optimizer)  # None without a checkpoint
    first, step = (int(resumed.epoch or 0), resumed.step) if resumed else (0, 0)
    for epoch in range(first + 1, epochs + 1):
        sampler.set_epoch(epoch)
        total, correct, samples = 0.0, 0, 0
        for batch in loader:
            points, labels = (tensor.to(ctx.device) for tensor in batch)
            optimizer.zero_grad()
            scores = model(points).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(scores, labels)
            loss.backward()
            optimizer.step()
            step += 1
            total += loss.item() * len(labels)
            correct += int(((scores > 0) == (labels > 0.5)).sum())
            samples += len(labels)
            ctx.progress((epoch - 1) * len(loader) + samples / batch_size, epochs * len(loader), unit="steps")
        metrics = {"loss": total / samples, "accuracy": correct / samples}
        ctx.log(metrics, step=step, epoch=epoch)
        # All ranks must call this method; `checkpoint:` in train.yaml says how often it saves.
        ctx.checkpoint(model=model, optimizer=optimizer, step=step, epoch=epoch, metrics=metrics, last=epoch == epochs)


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points on two spirals [count, 2], and the label (0 or 1) of each point's spiral [count]."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.rand(count, generator=generator).sqrt() * 3 * math.pi
    label = torch.randint(2, (count,), generator=generator)
    angle = turn + math.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 10
    return points + 0.02 * torch.randn(count, 2, generator=generator), label.float()
