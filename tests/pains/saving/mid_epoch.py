"""A restart in the middle of an epoch."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

PROBLEM = Problem(
    name="mid-epoch",
    title="A resume in the middle of an epoch repeats samples",
    happens=(
        "A checkpoint contains model and optimizer, but not the position in the data: after a restart the epoch "
        "begins again, and some samples are seen twice."
    ),
    threads=("Lightning-AI/pytorch-lightning#18780", "Lightning-AI/pytorch-lightning#19764"),
    files={
        "train.py": """
import sys

import torch

import ddptrain


def train(ctx: ddptrain.RankContext) -> None:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    loader = ctx.loader(torch.arange(12.0).reshape(12, 1), batch_size=1)
    resumed = ctx.resume(model=model)
    step = resumed.step if resumed else 0
    for epoch in ctx.epochs(1):
        for batch in loader:
            step += 1
            print(f"step {step}: sample {batch.item():.0f}", flush=True)
            model(batch.to(ctx.device)).sum().backward()
            ctx.checkpoint(model=model, step=step)
            if step == 3 and not resumed:
                sys.exit(75)  # the time of the job is over
""",
        "train.yaml": YAML,
    },
    peer_files={
        "train.py": """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
data = torch.arange(12.0).reshape(12, 1)
sampler = DistributedSampler(data, shuffle=True)
sampler.set_epoch(1)
step = 0
if resumed := Path("checkpoint.pt").exists():
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    step = state["step"]
for batch in DataLoader(data, batch_size=1, sampler=sampler):
    step += 1
    print(f"rank {dist.get_rank()} step {step}: sample {batch.item():.0f}", flush=True)
    model(batch).sum().backward()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, "checkpoint.pt")
    dist.barrier()
    if step == 3 and not resumed:
        sys.exit(75)  # the time of the job is over
""",
    },
    peer=Show(
        run(f"{TORCHRUN}; {TORCHRUN}"),
        must=(r"rank 0 step 1: sample (\d+)\n[\s\S]*rank 0 step 4: sample \1$",),
        keep=("rank 0 step",),
        verdict="Step 4 has the sample of step 1 again. The lines of rank 1 are left out.",
    ),
    ours=Show(
        run(f"{DDPTRAIN}; {DDPTRAIN} --resume auto"),
        must=(r"\[rank 0\] step 6: sample", "succeeded"),
        never=(r"\[rank 0\] step \d: sample (\d+)\n[\s\S]*\[rank 0\] step \d: sample \1$",),
        keep=(r"rank 0\] step", "ddptrain:", "^run "),
        verdict="No sample of rank 0 comes twice.",
    ),
    avoided=(
        "The position of `ctx.loader` is a part of every checkpoint, for every number of ranks: see "
        "[Checkpoints](checkpoints.md)."
    ),
    equal="`StatefulDataLoader` of torchdata has a position too, if the script saves it for each rank.",
)
