"""A disk that is full."""

from __future__ import annotations

from tests.pains.problem import TORCHRUN, YAML, Play, Problem, Show
from tests.pains.scene import Scene


def _on_small_disk(size_mb: int, *commands: str) -> Play:
    def play(scene: Scene) -> None:
        (scene.folder / "runs").mkdir()
        mount = f"mount -t tmpfs -o size={size_mb}m none runs"
        scene.run(f"unshare --map-root-user --mount sh -c '{'; '.join([mount, *commands])}'")

    return play


PROBLEM = Problem(
    name="disk-full",
    title="The disk is full, and the newest checkpoint is damaged",
    happens=(
        "The disk fills up during a save. The run ends with an error of a C++ file, and leaves a file that cannot"
        " be loaded."
    ),
    threads=("ultralytics/ultralytics#5793", "sml2h3/dddd_trainer#36"),
    files={
        "train.py": """
import torch

import ddptrain


def train(ctx: ddptrain.RankContext, steps: int = 20) -> None:
    model = ctx.prepare(torch.nn.Linear(500, 500))  # 1 MB
    for step in range(1, steps + 1):
        ctx.checkpoint(model=model, step=step)
""",
        "train.yaml": YAML + "checkpoint: {keep: 100}\n",
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
model = torch.nn.Linear(500, 500)  # 1 MB
for step in range(1, 21):
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, f"runs/step-{step:02}.pt")
        newest = step
    dist.barrier()
""",
    },
    peer=Show(
        _on_small_disk(4, TORCHRUN, "python train.py $(ls -d runs/* | tail -1)"),
        must=(
            "PytorchStreamWriter failed|No space left|iostream error|unexpected pos",
            "PytorchStreamReader failed|EOFError",
        ),
        keep=("PytorchStream", "No space", "EOFError", "iostream error", "unexpected pos"),
        verdict="The second error is that of loading the newest file.",
    ),
    ours=Show(
        _on_small_disk(6, "ddptrain train train.yaml", "echo exit code $?", "ls -d runs/*/checkpoints/*"),
        must=("No space left", "^exit code 4", r"checkpoints/step-\d"),
        keep=("ddptrain:", "^run ", "^exit code", "checkpoints/"),
    ),
    avoided=(
        "Files get their names when they are complete, so the last complete checkpoint stays; the message says "
        "what is full: [exit code 4]"
        "(troubleshooting/exit-4.md). [Cleanup](cleanup.md) has limits for the space of runs."
    ),
)
