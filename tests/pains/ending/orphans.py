"""Processes that stay behind."""

from __future__ import annotations

import time
from signal import SIGKILL

from tests.pains.problem import DDPTRAIN_SCRIPT, TORCHRUN, Play, Problem, Show
from tests.pains.scene import Scene


def _killed(text: str) -> Play:
    def play(scene: Scene) -> None:
        command = scene.start(text)
        command.until("step 3")
        command.send(SIGKILL)
        command.finish()
        time.sleep(5)
        scene.record(f"({len(scene.ranks())} processes of ranks are alive 5 s after SIGKILL to the launcher)")

    return play


PROBLEM = Problem(
    name="orphans",
    title="Ranks stay on the GPUs when their launcher is gone",
    happens="If the launcher is killed, its ranks go on without it and keep the memory of their GPUs.",
    threads=("ray-project/ray#31451", "pytorch/pytorch#5736"),
    files={
        "train.py": """
import time

import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 1000):
    dist.barrier()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
    time.sleep(0.2)
""",
    },
    peer=Show(_killed(TORCHRUN), must=(r"\(2 processes of ranks are alive",), keep=("step [123]$",)),
    ours=Show(_killed(DDPTRAIN_SCRIPT), must=(r"\(0 processes of ranks are alive",), keep=("ddptrain:", "step [123]$")),
    avoided=(
        "Every process ends when it loses its parent, from the driver down to the ranks and their children: see "
        "[Failure](design.md#failure)."
    ),
)
