"""Unequal numbers of batches."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

PROBLEM = Problem(
    name="uneven-data",
    title="Ranks with different numbers of batches",
    happens=(
        "A rank whose share of the data has one batch less leaves the loop first; the others fail or hang in the "
        "gradient exchange."
    ),
    threads=("pytorch/pytorch#38174", "pytorch/pytorch#33148", "Lightning-AI/pytorch-lightning#20404"),
    files={
        "train.py": """
import torch

import ddptrain


def train(ctx: ddptrain.RankContext) -> None:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    samples = torch.arange(7.0).reshape(7, 1)
    for batch in ctx.loader(samples, batch_size=1):
        model(batch.to(ctx.device)).sum().backward()
        print(f"rank {ctx.rank}: sample {batch.item():.0f}", flush=True)
""",
        "train.yaml": YAML,
    },
    peer_files={
        "train.py": """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1))
samples = torch.arange(7.0).reshape(7, 1)
for batch in torch.utils.data.DataLoader(samples[rank::2], batch_size=1):
    model(batch).sum().backward()
    print(f"rank {rank}: sample {batch.item():.0f}", flush=True)
dist.barrier()
""",
    },
    peer=Show(
        run(TORCHRUN, 20, "sample 5"),
        must=("sample 5", "nothing more for 20 s|Error"),
        keep=("Error", "sample", "Root Cause", "^  rank "),
    ),
    ours=Show(run(DDPTRAIN), must=("succeeded",), never=("Error",), keep=("sample", "ddptrain:", "^run ")),
    avoided=(
        "`ctx.loader` gives each rank the same number of batches; see [Your function](start/function.md). If own "
        "code divides the data, "
        "the missing rank is [named](#a-rank-leaves-early-with-success)."
    ),
    equal="`DistributedSampler` and `DistributedDataParallel.join()` of torch do the same, where the code uses them.",
)
