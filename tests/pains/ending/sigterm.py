"""SIGTERM of a scheduler: Slurm, Kubernetes, a spot instance."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGTERM

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show
from tests.pains.scene import Scene


def _stopped(first: str, again: str) -> Callable[[Scene], None]:
    def play(scene: Scene) -> None:
        command = scene.start(first)
        command.until("step 20")
        command.send(SIGTERM)
        command.finish()
        scene.record("(SIGTERM after step 20; the same command again)")
        command = scene.start(again)
        command.until(r"follows|\bstep 10\b")
        command.send(SIGTERM)
        command.finish()

    return play


_LOOP = """
        for parameter in model.parameters():
            parameter.data += 1
        if step % 10 == 0:
            print("step", step, flush=True)
        time.sleep(0.05)
"""

PROBLEM = Problem(
    name="sigterm",
    title="SIGTERM loses the work since the last save",
    happens=(
        "Schedulers send SIGTERM and wait before they take a machine. The launcher passes it on, and the ranks "
        "end without a save, unless their code handles signals, on all ranks in the same step."
    ),
    threads=("pytorch/pytorch#119856", "pytorch/examples#1351"),
    files={
        "train.py": f"""
import time

import torch

import ddptrain


def train(ctx: ddptrain.RankContext, steps: int = 1000) -> None:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    resumed = ctx.resume(model=model)
    for step in range(resumed.step + 1 if resumed else 1, steps + 1):
        if ctx.rank == 0 and (resumed and step == resumed.step + 1):
            print("step", step, "follows", flush=True){_LOOP.rstrip()}
        ctx.checkpoint(model=model, step=step)
""",
        "train.yaml": YAML + "checkpoint: {every_steps: 500}\n",
    },
    peer_files={
        "train.py": """
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
first = 1
if Path("checkpoint.pt").exists():
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    first = state["step"] + 1
for step in range(first, 1001):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0 and step % 10 == 0:
        print("step", step, flush=True)
    if dist.get_rank() == 0 and step % 500 == 0:
        torch.save({"model": model.state_dict(), "step": step}, "checkpoint.pt")
    time.sleep(0.05)
""",
    },
    peer=Show(
        _stopped(TORCHRUN, TORCHRUN),
        must=(r"SignalException", r"same command again\)[\s\S]*step 10\b", r"exit code 1\)"),
        keep=("SignalException", "step", "closing signal"),
        verdict="The second run begins at step 1 again, and exit code 1 is that of every other failure.",
    ),
    ours=Show(
        _stopped(f"{DDPTRAIN} --run-id nightly --resume auto", f"{DDPTRAIN} --run-id nightly --resume auto"),
        must=(r"exit code 75", r"step (2\d|3\d) follows"),
        keep=("ddptrain:", "step", "^run "),
    ),
    avoided=(
        "All ranks save and end with the same call of `ctx.checkpoint`, also if no save is due, and the exit code"
        " is 75: see "
        "[Preemption](checkpoints.md#preemption). A script with an own handler gets the signal."
    ),
    equal=(
        "Newer versions of torchrun have `--shutdown-timeout` for saves that take longer than 30 s, as "
        "`failure.grace_s` of ddptrain."
    ),
)
