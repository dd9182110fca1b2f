"""The time of the first optimizer step of a small DDP model: the same function under ddptrain and torchrun."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def first_step(folder: str) -> None:
    """Take one step and record its time."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    time_ns = time.time_ns()
    Path(folder, f"step-{dist.get_rank()}").write_text(str(time_ns))


def workload(ctx: Any, folder: str) -> None:
    """The function that ddptrain calls in each rank."""
    first_step(folder)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    first_step(**json.loads(sys.argv[1]))
    dist.destroy_process_group()
