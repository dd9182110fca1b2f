"""The time of a step of about 5 ms on one core, with five numbers logged in each, and when training was over."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


def workload(ctx: Any, out: str, warm_s: float, seconds: float) -> None:
    """Trains for `warm_s`, in which trackers start, then for `seconds`; rank 0 writes the mean step to `out`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 31))
    inputs, targets = torch.randn(40, 256), torch.randint(31, (40,))
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    step = 0

    def train(steps: int) -> float:
        nonlocal step
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = functional.cross_entropy(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            step += 1
            ctx.log({"train/loss": loss.detach(), **{f"train/{name}": step for name in "abcd"}}, step=step)
        dist.barrier()
        return (time.perf_counter() - began) / steps

    took = torch.tensor(train(50))
    dist.all_reduce(took)  # so that every rank takes the same number of steps
    step_s = took.item() / dist.get_world_size()
    train(max(1, round(warm_s / step_s)))
    step_s = train(max(1, round(seconds / step_s)))
    if ctx.rank == 0:
        Path(out).write_text(json.dumps({"step_ms": step_s * 1e3, "steps": step, "ended_at": time.time()}))
