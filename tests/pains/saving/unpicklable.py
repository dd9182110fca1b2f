"""State that cannot be pickled."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

PROBLEM = Problem(
    name="unpicklable",
    title="State that cannot be saved destroys the last checkpoint",
    happens=(
        "Something in the state cannot be pickled, such as a lambda. The save fails after it has opened, and "
        "emptied, the file of the last good checkpoint."
    ),
    threads=("pytorch/pytorch#170244",),
    files={
        "train.py": """
import torch

import ddptrain


def train(ctx: ddptrain.RankContext) -> None:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    ctx.checkpoint(model=model, step=1)
    ctx.checkpoint(model=model, step=2, schedule={"warmup": lambda step: step / 100})
""",
        "train.yaml": YAML,
    },
    peer_files={
        "train.py": """
import sys

import torch
import torch.distributed as dist

if sys.argv[1:]:
    print("loading step", torch.load(sys.argv[1])["step"])
    sys.exit()
dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict(), "step": 1}, "checkpoint.pt")
    state = {"model": model.state_dict(), "step": 2, "schedule": {"warmup": lambda step: step / 100}}
    torch.save(state, "checkpoint.pt")
dist.barrier()
""",
    },
    peer=Show(
        run(f"{TORCHRUN}; python train.py checkpoint.pt"),
        must=("Can't (get|pickle)", "PytorchStreamReader failed|EOFError|UnpicklingError"),
        keep=("Can't", "PytorchStreamReader", "EOFError", "UnpicklingError"),
        verdict="The second error is that of loading the checkpoint of step 1.",
    ),
    ours=Show(
        run(f"{DDPTRAIN}; ls -d runs/*/checkpoints/*"),
        must=("schedule", "step-0*1\\b"),
        keep=("ddptrain:", "^run ", "checkpoints/"),
    ),
    avoided=(
        "The state is copied and pickled before a file is opened, and the message names the key. The last "
        "checkpoint stays: see [Checkpoints](checkpoints.md)."
    ),
)
