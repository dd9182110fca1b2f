"""A question that nobody answers."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN_SCRIPT, TORCHRUN, Problem, Show, run

PROBLEM = Problem(
    name="stdin",
    title="A question in the code stops an unattended run",
    happens="A library asks something on the terminal, such as a login or `overwrite? [y/N]`. Every rank reads the same input, and nobody is there.",
    threads=("pytorch/pytorch#113775",),
    files={
        "train.py": """
import torch.distributed as dist

dist.init_process_group("gloo")
if input("overwrite the model? [y/N] ") == "y":
    print("training")
""",
    },
    peer=Show(
        run(f"sleep 60 | {TORCHRUN}", 25),  # a terminal at which nobody types
        must=("still running after 25 s",),
        keep=("overwrite",),
        verdict="`sleep 60 |` is a terminal at which nobody types.",
    ),
    ours=Show(run(f"sleep 60 | {DDPTRAIN_SCRIPT}", 60), must=("failed first: EOFError",), keep=("ddptrain:", "input", "EOFError")),
    avoided="The standard input of ranks is empty, so a question fails at once, with its line: see [Your torchrun script](start/script.md).",
    equal="For debugging torchrun is better: `torch.distributed.breakpoint()` works in its ranks, and not in those of ddptrain.",
)
