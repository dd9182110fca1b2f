"""From a rank's SIGKILL to the last rank's next step: the same function under ddptrain and torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_DIES_AT = 5


def steps(folder: str) -> None:
    """Take some steps. Rank 1 is killed in the first attempt; the second attempt records the time of its first step."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, _DIES_AT + 2):
        if first and step == _DIES_AT and dist.get_rank() == 1:
            Path(folder, "fault").write_text(str(time.time_ns()))
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        if not first and step == 1:
            time_ns = time.time_ns()
            Path(folder, f"step-{dist.get_rank()}").write_text(str(time_ns))


def workload(ctx: Any, folder: str) -> None:
    """The function that ddptrain calls in each rank."""
    steps(folder)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    steps(**json.loads(sys.argv[1]))
    dist.destroy_process_group()
