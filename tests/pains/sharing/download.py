"""A file that every rank downloads."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

_DOWNLOAD = """
def data_set() -> int:
    file = Path("data.bin")
    if not file.exists():
        with file.open("wb") as target:
            for _ in range(5):  # a download of 5 MB
                target.write(bytes(1_000_000))
                target.flush()
                time.sleep(0.5)
    return file.stat().st_size // 1_000_000
"""

PROBLEM = Problem(
    name="download",
    title="All ranks download the same file",
    happens=(
        "Each rank looks whether the data set is there, and downloads it if not. A rank that comes a little later"
        " reads a file that is half written."
    ),
    threads=("pytorch/tutorials#3065", "Lightning-AI/pytorch-lightning#17732"),
    files={
        "train.py": f"""
import time
from pathlib import Path

import ddptrain

{_DOWNLOAD}

def train(ctx: ddptrain.RankContext) -> None:
    time.sleep(ctx.rank)
    with ctx.rank_zero_first():
        print(f"has {{data_set()}} of 5 MB", flush=True)
""",
        "train.yaml": YAML,
    },
    peer_files={
        "train.py": f"""
import time
from pathlib import Path

import torch.distributed as dist

{_DOWNLOAD}

dist.init_process_group("gloo")
time.sleep(dist.get_rank())
print(f"rank {{dist.get_rank()}} has {{data_set()}} of 5 MB", flush=True)
""",
    },
    peer=Show(run(TORCHRUN), must=("rank 0 has 5 of 5 MB", "rank 1 has [1-4] of 5 MB"), keep=("of 5 MB",)),
    ours=Show(run(DDPTRAIN), must=(r"rank 0\] has 5 of 5", r"rank 1\] has 5 of 5"), keep=("of 5 MB", "^run ")),
    avoided=(
        "`ctx.rank_zero_first()`: rank 0 runs the block first, then the others do. An error of rank 0 ends the "
        "run, so nobody waits: see [Your function](start/function.md#which-methods-all-ranks-must-call)."
    ),
    equal="Two barriers of torch do the same as long as no rank fails.",
)
