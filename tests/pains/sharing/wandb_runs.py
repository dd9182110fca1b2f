"""A W&B run for each rank."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

PROBLEM = Problem(
    name="wandb-runs",
    title="W&B has as many runs as there are ranks",
    happens="Each rank calls `wandb.init`, so each makes a run, of which only the first one has data.",
    threads=("Lightning-AI/pytorch-lightning#11380", "Lightning-AI/pytorch-lightning#1972"),
    files={
        "train.py": """
import ddptrain


def train(ctx: ddptrain.RankContext) -> None:
    for step in range(1, 11):
        ctx.log({"train/loss": 1 / step}, step=step)
""",
        "train.yaml": YAML + "env: {WANDB_MODE: offline}\ntracking: {wandb: {mode: rank0}}\n",
    },
    peer_files={
        "train.py": """
import torch.distributed as dist
import wandb

dist.init_process_group("gloo")
with wandb.init(project="train", mode="offline") as run:
    for step in range(1, 11):
        if dist.get_rank() == 0:
            run.log({"train/loss": 1 / step})
""",
    },
    peer=Show(run(f"{TORCHRUN}; ls -d wandb/offline-run*"), must=(r"(^wandb/offline-run-.*\n){2}",), keep=("^wandb/",)),
    ours=Show(
        run(f"{DDPTRAIN}; find runs -name 'offline-run*'"),
        must=(r"^runs/.*offline-run-",),
        never=(r"(^runs/.*offline-run-.*\n){2}",),
        keep=("^runs/", "ddptrain: W&B", "^run "),
    ),
    avoided=(
        "The driver makes the id of the W&B run, and rank 0 logs into it, also after a restart: see "
        "[Tracking](tracking.md). `mode: process` and `shared` are for all ranks."
    ),
    equal="A script that calls `wandb.init` on rank 0 alone has one run.",
)
