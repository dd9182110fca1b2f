"""A restart that does not come up."""

from __future__ import annotations

from tests.pains.problem import Problem, Show, run

PROBLEM = Problem(
    name="restart",
    title="The restart after a failure hangs",
    happens=(
        "The ranks of the new attempt meet in the store of the old one, and wait for, or connect to, processes "
        "that are gone."
    ),
    threads=("pytorch/pytorch#135712", "pytorch/pytorch#123678"),
    files={
        "train.py": """
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(1, 6):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print("attempt", attempt, "step", step, flush=True)
    if step == 3 and attempt == 0:
        os._exit(1)
dist.destroy_process_group()
""",
    },
    peer=Show(
        run("torchrun --standalone --nproc-per-node 2 --max-restarts 1 train.py", 30, "attempt 0 step 3"),
        must=("attempt 0 step 3", "exit code 1|nothing more for"),
        never=("attempt 1 step",),
        keep=("attempt", "Error", "Gloo"),
        verdict="It depends on the moment: in other runs the restart comes up.",
        tries=6,
    ),
    ours=Show(
        run("ddptrain run --ranks 2 --set failure.max_restarts=1 train.py"),
        must=("attempt 1 step 5", "succeeded"),
        keep=("ddptrain:", "attempt", "^run "),
    ),
    avoided=(
        "Each attempt has a new store, on a new port, and processes of an earlier attempt are gone before it "
        "starts: see [Restart after a failure](checkpoints.md#restart-after-a-failure)."
    ),
)
