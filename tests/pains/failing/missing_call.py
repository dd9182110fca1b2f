"""A call that all ranks must make, made by one."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

PROBLEM = Problem(
    name="missing-call",
    title="`if rank == 0: save()` hangs",
    happens="Saving contains a collective, so all ranks must call it; one that is called on rank 0 alone hangs.",
    threads=("deepspeedai/DeepSpeed#801", "pytorch/pytorch#54059"),
    files={
        "train.py": """
import torch

import ddptrain


def train(ctx: ddptrain.RankContext, steps: int = 20) -> None:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    for step in range(1, steps + 1):
        model(torch.ones(1, 1)).sum().backward()
        if ctx.rank == 0:  # wrong
            ctx.checkpoint(model=model, step=step)
""",
        "train.yaml": YAML,
    },
    peer_files={
        "train.py": """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
for step in range(1, 21):
    print("step", step, flush=True)
    model(torch.ones(1, 1)).sum().backward()
    if dist.get_rank() == 0:  # wrong
        dcp.save(model.state_dict(), checkpoint_id=f"step-{step}")
dist.barrier()
""",
    },
    peer=Show(run(TORCHRUN, 20, "step 1"), must=("step 1", "nothing more for 20 s"), keep=("Error", "step")),
    ours=Show(run(DDPTRAIN), must=("rank 0 is in ctx.checkpoint.*rank 1 has not called",), keep=("ddptrain:",)),
    avoided=(
        "Each rank counts its calls of the methods that [all ranks must "
        "call](start/function.md#which-methods-all-ranks-must-call). If one can't come any "
        "more, the run ends within seconds and names it. No time limit decides."
    ),
)
