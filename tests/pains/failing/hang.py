"""A hang without a culprit."""

from __future__ import annotations

from tests.pains.problem import TORCHRUN, Problem, Show, run

PROBLEM = Problem(
    name="hang",
    title="A run hangs, and nobody knows which rank",
    happens=(
        "One rank waits for something outside of training; the others wait for it in a collective, up to 30 minutes."
    ),
    threads=("pytorch/pytorch#118582", "NVIDIA/nccl#1260"),
    files={
        "train.py": """
import socket

import torch
import torch.distributed as dist


def fetch_labels():
    server = socket.create_server(("127.0.0.1", 0))  # a server that never answers
    return socket.create_connection(server.getsockname()).recv(1)


dist.init_process_group("gloo")
for step in range(100):
    if step == 3 and dist.get_rank() == 1:
        fetch_labels()
    dist.all_reduce(torch.ones(1))
    if step < 3:
        print("step", step, flush=True)
""",
    },
    peer=Show(
        run(TORCHRUN, 20, "step 2"),
        must=("step 2", "nothing more for 20 s"),
        verdict=(
            "Nothing is said. The timeout of gloo is 30 minutes, that of NCCL 10; then the ranks that waited are named."
        ),
    ),
    ours=Show(
        run("ddptrain run --ranks 2 --set failure.hang_timeout_s=8 train.py"),
        must=(
            r"rank 1 on \S+ hung: no progress for 8 s, it is in train\.py:\d+ in fetch_labels",
            "while rank 0 waits for it in all_reduce",
            r"exit code 5",
        ),
        keep=("ddptrain:", "step"),
    ),
    avoided=(
        "All ranks are asked for their stacks, and the one that is missing is named, with the line where it is: "
        "[exit code 5]"
        "(troubleshooting/exit-5.md). Without `failure.hang_timeout_s` the limit follows the run, between 40 s "
        "and 10 minutes."
    ),
)
