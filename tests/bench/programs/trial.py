"""A trial of a sweep: some steps of a small LSTM, under ddptrain and torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.linear = nn.Linear(64, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.lstm(inputs)
        scores: Tensor = self.linear(hidden[:, -1])
        return scores


def train_steps(learning_rate: float, steps: int) -> float:
    """Train with the process group that there is; return the last loss."""
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(_Small())
    inputs, targets = torch.randn(32, 8, 16), torch.randint(16, (32,))
    optimizer = torch.optim.Adam(net.parameters(), learning_rate)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
    return float(loss)


def workload(ctx: Any, learning_rate: float, steps: int) -> None:
    """Log the loss of the last step."""
    ctx.log({"loss": ctx.mean(train_steps(learning_rate, steps))}, step=steps)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    given = json.loads(sys.argv[1])
    done = Path(given.pop("done"))
    print(train_steps(**given))
    (done / f"rank-{dist.get_rank()}").touch()
    dist.destroy_process_group()
