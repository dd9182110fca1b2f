"""The rate of a training loop after a warm-up: the same function under ddptrain and torchrun.

"lstm" is the tutorial's model on batches of 1024 windows: its activations are large, and the C library gives their
pages back to the kernel after each step. "mlp" has small activations, which stay in the process's heap either way.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class _Tutorial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(31, 128, num_layers=4, batch_first=True, dropout=0.1)
        self.linear = nn.Linear(128, 31)

    def forward(self, windows: Tensor) -> Tensor:
        hidden, _ = self.lstm(windows)
        scores: Tensor = self.linear(hidden[:, -1])
        return scores


def steady(out: str, model: str, seconds: float) -> None:
    """Trains for about `seconds` after a warm-up; rank 0 writes samples, seconds of all ranks to `out`."""
    torch.manual_seed(0)
    if model == "lstm":
        net: nn.Module = _Tutorial()
        inputs = functional.one_hot(torch.randint(31, (1024, 8)), 31).float()
    else:
        net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 31))
        inputs = torch.randn(64, 256)
    targets = torch.randint(31, (len(inputs),))
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)

    def train(steps: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
        dist.barrier()
        return time.perf_counter() - began

    train(3)
    took = torch.tensor(train(5) / 5)
    dist.all_reduce(took)  # so that every rank takes the same number of steps
    steps = max(5, round(seconds * dist.get_world_size() / took.item()))
    took_s = train(steps)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"samples": steps * len(inputs) * dist.get_world_size(), "seconds": took_s}))


def workload(ctx: Any, out: str, model: str, seconds: float) -> None:
    """The function that ddptrain calls in each rank."""
    steady(out, model, seconds)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    steady(**json.loads(sys.argv[1]))
    dist.destroy_process_group()
