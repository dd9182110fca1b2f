"""A W&B server that does not answer."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Play, Problem, Show
from tests.pains.scene import Scene


def _silent_server(text: str, timeout_s: float) -> Play:
    def play(scene: Scene) -> None:
        port = scene.free_port()
        scene.env |= {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0" * 40}
        scene.start(f"python silent.py {port}")
        scene.run(text, timeout_s, "starts")

    return play


PROBLEM = Problem(
    name="wandb-hangs",
    title="Training waits for W&B",
    happens=(
        "The server of a tracker does not answer, or the end of its run hangs: all ranks wait for the one that logs."
    ),
    threads=("facebookresearch/fairseq#4619", "Lightning-AI/pytorch-lightning#6106"),
    files={
        "train.py": """
import ddptrain


def train(ctx: ddptrain.RankContext) -> None:
    print("starts", flush=True)
    for step in range(1, 11):
        loss = ctx.mean(1 / step)
        ctx.log({"train/loss": loss}, step=step)
        print("step", step, flush=True)
""",
        "train.yaml": YAML + "tracking: {wandb: {mode: rank0, init_timeout_s: 5, finish_timeout_s: 5}}\n",
        "silent.py": """
import socket
import sys

server = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=100)
connections = []
while True:
    connections.append(server.accept())  # and never answers
""",
    },
    peer_files={
        "train.py": """
import torch
import torch.distributed as dist
import wandb

dist.init_process_group("gloo")
print("starts", flush=True)
run = wandb.init(project="train") if dist.get_rank() == 0 else None
for step in range(1, 11):
    loss = torch.tensor(1 / step)
    dist.all_reduce(loss)
    if run:
        run.log({"train/loss": loss.item()})
    print("step", step, flush=True)
""",
    },
    peer=Show(
        _silent_server(TORCHRUN, 25),
        must=("starts", "nothing more for 25 s"),
        never=("step 1",),
        keep=("starts", "step", "wandb"),
        verdict="No step is taken before `wandb.init` gives up, after 90 s.",
    ),
    ours=Show(
        _silent_server(DDPTRAIN, 150),
        must=(r"step 10", "succeeded"),
        keep=("ddptrain:", "step (1|10)$", "^run "),
    ),
    avoided=(
        "A tracker has a thread and a queue of its own, and time limits for its start (`init_timeout_s`, 20 s) "
        "and its end (`finish_timeout_s`, 30 s): training never waits, see [Tracking](tracking.md)."
    ),
)
