"""The same line from every rank."""

from __future__ import annotations

from tests.pains.problem import Problem, Show, run

PROBLEM = Problem(
    name="log-lines",
    title="Every rank prints the same line",
    happens="A harmless warning is printed once for each rank, and the lines that matter are lost among the copies.",
    threads=("pytorch/pytorch#162999", "pytorch/pytorch#134458"),
    files={
        "train.py": """
import os
import time
import warnings
from pathlib import Path

Path(f"ready-{os.environ['RANK']}").touch()
while len(list(Path().glob("ready-*"))) < 20:  # ranks of real training are in step
    time.sleep(0.01)

warnings.warn("the default of antialias will change")
if os.environ["RANK"] == "7":
    print("this line is of one rank", flush=True)
""",
    },
    peer=Show(
        run("torchrun --standalone --nproc-per-node 20 train.py"),
        must=(r"(antialias will change[\s\S]*){20}", "this line"),
        keep=("antialias", "this line"),
    ),
    ours=Show(
        run("ddptrain run --ranks 20 train.py"),
        must=(r"\[ranks .*antialias will change", r"\[rank 7\] this line"),
        never=(r"(UserWarning[\s\S]*){6}",),
        keep=("antialias", "this line", "^run "),
    ),
    avoided=(
        "From 17 ranks on, equal lines are printed once, with the ranks: see [Many ranks](output.md#many-ranks). "
        "The log of each rank has all of its lines."
    ),
    equal="`torchrun --local-ranks-filter 0` shows one rank of each host, and hides the others.",
)
