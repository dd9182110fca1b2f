"""Exit code -9."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN_SCRIPT, TORCHRUN, Problem, Show, run

PROBLEM = Problem(
    name="exit-minus-9",
    title="exitcode: -9",
    happens="A rank is killed by SIGKILL, most often by the kernel, because memory was short.",
    threads=("bmaltais/kohya_ss#1065", "open-mmlab/mmdetection#10101"),
    files={
        "train.py": """
import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(100):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does if memory is short
    dist.all_reduce(torch.ones(1))
""",
    },
    peer=Show(
        run(TORCHRUN),
        must=("exitcode  : -9", r"Signal 9 \(SIGKILL\)"),
        keep=("RuntimeError", "Root Cause", "^  rank ", "exitcode", "traceback :"),
    ),
    ours=Show(run(DDPTRAIN_SCRIPT), must=("rank 1 .*killed by SIGKILL",), keep=("ddptrain:",)),
    avoided=(
        "The message has the words for it, and says if the kernel counted such a kill; `ddptrain explain 1` and "
        "the page on "
        "[exit code 1](troubleshooting/exit-1.md) say what to do. `failure.max_restarts` continues from the last "
        "checkpoint."
    ),
    equal="torchrun names the rank and the signal as well.",
)
