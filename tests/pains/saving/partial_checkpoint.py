"""A rank is killed while it saves."""

from __future__ import annotations

from tests.pains.problem import TORCHRUN, YAML, Play, Problem, Show, run
from tests.pains.scene import Scene


def _twice(text: str) -> Play:
    def play(scene: Scene) -> None:
        scene.run(text)
        scene.run(text)

    return play


PROBLEM = Problem(
    name="partial-checkpoint",
    title="A checkpoint is half written, and the restart fails",
    happens="A rank is killed while it writes a checkpoint. The restart finds the newest file, which is damaged.",
    threads=("ray-project/ray#41700", "Lightning-AI/pytorch-lightning#21431"),
    files={
        "train.py": """
import os
import signal

import torch

import ddptrain


def train(ctx: ddptrain.RankContext, steps: int = 3) -> None:
    model = torch.nn.Linear(5000, 5000)  # 100 MB
    resumed = ctx.resume(model=model)
    print("starts at step", resumed.step + 1 if resumed else 1, flush=True)
    for step in range(resumed.step + 1 if resumed else 1, steps + 1):
        ctx.checkpoint(model=model, step=step)
        if step == 1:
            ctx.checkpoint(model=model, step=step, last=True)  # waits until it is written
        if step == 2 and not resumed and ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # while a thread writes
""",
        "train.yaml": YAML + "failure: {max_restarts: 1, backoff_s: 0}\n",
    },
    peer_files={
        "train.py": """
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def kill_while_written(file: Path) -> None:
    while not file.exists() or file.stat().st_size < 1_000_000:
        time.sleep(0.0001)
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
model, first = torch.nn.Linear(5000, 5000), 1  # 100 MB
saved = sorted(Path().glob("step-*.pt"))
if saved:
    state = torch.load(saved[-1])
    first = state["step"] + 1
print("starts at step", first, flush=True)
for step in range(first, 4):
    dist.barrier()
    file = Path(f"step-{step}.pt")
    if dist.get_rank() == 0:
        if step == 2:
            threading.Thread(target=kill_while_written, args=(file,)).start()
        torch.save({"model": model.state_dict(), "step": step}, file)
""",
    },
    peer=Show(
        _twice(TORCHRUN),
        must=("PytorchStreamReader failed", "exit code 1"),
        keep=("starts at step", "PytorchStreamReader", "SIGKILL"),
    ),
    ours=Show(
        run("ddptrain train train.yaml"),
        must=("starts at step 2", "succeeded"),
        keep=("ddptrain:", "starts at step", "^run "),
    ),
    avoided=(
        "A checkpoint appears under its name when all of its files are written, with a manifest of sizes and "
        "hashes, which each restart verifies: see "
        "[Restart after a failure](checkpoints.md#restart-after-a-failure)."
    ),
    equal="A script for torchrun that writes into another file and renames it does not lose its checkpoint either.",
)
