"""A loss that is not finite, on one rank."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

_LOOP = """        loss = model(torch.ones(1, 1, device={device})).sum()
        if step == 2 and {rank} == 1:
            loss = loss * float("nan")
"""

PROBLEM = Problem(
    name="nan",
    title="One rank skips a bad batch, and the run hangs",
    happens=(
        "A rank whose loss is NaN skips the step. The others wait in the gradient exchange of this step; from "
        "then on they exchange gradients of different steps."
    ),
    threads=("Lightning-AI/pytorch-lightning#5243", "Lightning-AI/pytorch-lightning#5359"),
    files={
        "train.py": f"""
import torch

import ddptrain


def train(ctx: ddptrain.RankContext) -> None:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    for step in range(1, 5):
{_LOOP.format(device="ctx.device", rank="ctx.rank")}        if not ctx.all_finite(loss):
            print("skips step", step, flush=True)
            continue
        loss.backward()
""",
        "train.yaml": YAML,
    },
    peer_files={
        "train.py": f"""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    for step in range(1, 5):
{_LOOP.format(device='"cpu"', rank="dist.get_rank()")}        if not torch.isfinite(loss):
            print("rank", dist.get_rank(), "skips step", step, flush=True)
            continue
        loss.backward()


dist.init_process_group("gloo")
train()
dist.barrier()
""",
    },
    peer=Show(
        run(TORCHRUN, 20, "skips"), must=("rank 1 skips step 2", "nothing more for 20 s|Error"), keep=("skips", "Error")
    ),
    ours=Show(
        run(DDPTRAIN),
        must=("rank 0. skips step 2", "rank 1. skips step 2", "succeeded"),
        keep=("skips", "ddptrain:", "^run "),
    ),
    avoided=(
        "`ctx.all_finite(loss)` has the same value on all ranks; `ctx.step` leaves out steps with infinite "
        "gradients on all of them: see [Your function](start/function.md#precision-accumulation-and-compilation)."
    ),
)
