"""Two runs on one machine."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN_SCRIPT, Play, Problem, Show
from tests.pains.scene import Scene


def _two(text: str, *, port: bool) -> Play:
    def play(scene: Scene) -> None:
        command = f"{text} --master-port {scene.free_port()} train.py" if port else text
        first = scene.start(command)
        first.until("step 1")
        scene.run(command)
        first.finish()
        scene.record("(the first output is that of the second run, which was started while the first one trained)")

    return play


PROBLEM = Problem(
    name="ports",
    title="Two runs on one machine: address already in use",
    happens=(
        "All runs use the same port for their rendezvous (29500), so the second run on a machine fails, as does "
        "one after a run that has left processes."
    ),
    threads=("pytorch/pytorch#73320", "pytorch/pytorch#126510", "huggingface/accelerate#3175"),
    files={
        "train.py": """
import time

import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 16):
    dist.barrier()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
    time.sleep(1)
dist.destroy_process_group()
""",
    },
    peer=Show(
        _two("torchrun --nproc-per-node 2", port=True),
        must=("EADDRINUSE|address already in use|Address already in use", "exit code 1"),
        keep=("DistNetworkError", "EADDRINUSE", "step 15"),
    ),
    ours=Show(
        _two(DDPTRAIN_SCRIPT, port=False),
        must=(r"(exit code 0[\s\S]*){2}",),
        never=("in use",),
        keep=("ddptrain: training", "step 15", "^run "),
    ),
    avoided=(
        "The store of a run is opened by the worker of rank 0, on a port that the kernel chooses: see [A "
        "launch](design.md#a-launch)."
    ),
    equal="torchrun with `--standalone`, on a single machine.",
)
