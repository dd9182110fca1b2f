"""A rank that ends too early, with 0."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN_SCRIPT, TORCHRUN, Problem, Show, run

PROBLEM = Problem(
    name="exit-zero",
    title="A rank leaves early, with success",
    happens=(
        "One rank returns before the others, for example because it found no files; the others fail or hang in "
        "their next collective."
    ),
    threads=("pytorch/pytorch#138322",),
    files={
        "train.py": """
import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(100):
    if step == 3 and dist.get_rank() == 1:
        sys.exit(0)  # "no files are left"
    dist.all_reduce(torch.ones(1))
""",
    },
    peer=Show(
        run(TORCHRUN),
        must=(r"Root Cause \(first observed failure\):\n\[0\]:.*\n.*\n.*\n  rank      : 0 ",),
        keep=("RuntimeError", "DistBackendError", "Root Cause", "^  rank ", "exitcode", "traceback :"),
        verdict="Only rank 0 is named, which did nothing wrong.",
    ),
    ours=Show(run(DDPTRAIN_SCRIPT), must=("rank 1",), keep=("ddptrain:", "Error")),
    avoided=(
        "The end of each rank is recorded, and a rank that has ended is looked for when another loses its peer: "
        "see [exit code 1](troubleshooting/exit-1.md)."
    ),
)
