"""A terminal that is closed."""

from __future__ import annotations

from signal import SIGHUP

from tests.pains.problem import DDPTRAIN_SCRIPT, TORCHRUN, Play, Problem, Show
from tests.pains.scene import Scene


def _hung_up(text: str) -> Play:
    def play(scene: Scene) -> None:
        command = scene.start(text)
        command.until("step 1")
        command.send(SIGHUP)
        command.finish()
        scene.record("(the terminal was closed after step 1: SIGHUP)")

    return play


PROBLEM = Problem(
    name="sighup",
    title="The training ends when the terminal is closed, in spite of nohup",
    happens="torchrun has a handler of its own for SIGHUP, which replaces what nohup has set.",
    threads=("pytorch/pytorch#67538", "open-mmlab/mmsegmentation#1998", "hiyouga/LlamaFactory#3036"),
    files={
        "train.py": """
import time

import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 6):
    dist.barrier()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
    time.sleep(0.5)
dist.destroy_process_group()
""",
    },
    peer=Show(
        _hung_up(f"nohup {TORCHRUN}"),
        must=(r"SignalException: Process \d+ got signal: (1|Signals.SIGHUP|SIGHUP)",),
        never=("step 5",),
        keep=("SignalException", "step", "SIGHUP"),
    ),
    ours=Show(
        _hung_up(f"nohup {DDPTRAIN_SCRIPT}"), must=("step 5", "exit code 0"), keep=("ddptrain:", "step", "^run ")
    ),
    avoided=(
        "A signal that is ignored when the command starts stays ignored. `--detach` starts a run that does not "
        "need the shell: see [In the background](checkpoints.md#in-the-background)."
    ),
    equal="torchrun in tmux, or with `setsid`, goes on as well.",
)
