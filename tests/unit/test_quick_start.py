"""The stand-in for torch._dynamo: training does without the real one, and torch.compile gets it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.command import QUICK_START

TRAINING = """
import os, sys, torch
import torch.distributed as dist
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.ones(1, 2)).sum().backward()
optimizer.step()
dist.destroy_process_group()
print(type(sys.modules["torch._dynamo"]).__name__)
print(torch.compile(model, backend="eager")(torch.ones(1, 2)).shape)
print(type(sys.modules["torch._dynamo"]).__name__)
"""


def test_training_does_without_torch_dynamo_and_torch_compile_gets_it() -> None:
    """Fails where a new torch calls more of torch._dynamo: the tests would become slow."""
    env = {**os.environ, "PYTHONPATH": QUICK_START, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", TRAINING], env=env, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == ["_StandIn", "torch.Size([1, 1])", "module"], done.stderr
