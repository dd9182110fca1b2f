"""The rank that failed first is hidden by those that it takes down."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN_SCRIPT, TORCHRUN, Problem, Show, run

PROBLEM = Problem(
    name="root-cause",
    title="The error that is reported is not the cause",
    happens=(
        "Rank 1 fails and cleans up; meanwhile rank 0 loses its connection and fails too. The launcher names the rank "
        "whose process ended first, which is the victim."
    ),
    threads=("pytorch/pytorch#88251", "pytorch/pytorch#160908"),
    files={
        "train.py": """
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    for step in range(100):
        if step == 3 and rank == 1:
            raise ValueError("sample 4711 has no label")
        dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
    time.sleep(10 * rank)  # rank 1 ends its trackers and closes its files
""",
    },
    peer=Show(
        run(TORCHRUN),
        must=(r"Root Cause \(first observed failure\):\n\[0\]:.*\n.*\n.*\n  rank      : 0 ",),
        never=("sample 4711",),
        keep=(
            "ValueError",
            "RuntimeError",
            "DistBackendError",
            "Connection",
            "Root Cause",
            "^  rank ",
            "exitcode",
            "traceback :",
        ),
        verdict=("The summary names rank 0. Rank 1 is stopped in its clean-up, so that its message is shown nowhere."),
    ),
    ours=Show(
        run(DDPTRAIN_SCRIPT),
        must=("rank 1 on .* failed first: ValueError: sample 4711 has no label",),
        never=("rank 0 on .* failed first",),
        keep=("ddptrain:", "sample 4711", "train.py"),
    ),
    avoided=(
        "The failure event is written when the exception leaves the code, with its time. A rank that is stopped while "
        "it handles an exception reports it. The earliest that is not a consequence is the "
        "[root cause](troubleshooting/exit-1.md)."
    ),
)
