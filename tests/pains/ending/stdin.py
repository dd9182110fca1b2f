"""A question that nobody answers."""

from __future__ import annotations

import os

from tests.pains.problem import DDPTRAIN_SCRIPT, TORCHRUN, Play, Problem, Show
from tests.pains.scene import Scene


def _at_a_terminal(text: str) -> Play:
    def play(scene: Scene) -> None:
        os.mkfifo(scene.folder / "terminal")
        opened = os.open(scene.folder / "terminal", os.O_RDWR)
        try:
            scene.run(f"{text} < terminal", 20, "overwrite")
        finally:
            os.close(opened)

    return play


PROBLEM = Problem(
    name="stdin",
    title="A question in the code stops an unattended run",
    happens=(
        "A library asks something on the terminal, such as a login or `overwrite? [y/N]`. Every rank reads the "
        "same input, and nobody is there."
    ),
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
        _at_a_terminal(TORCHRUN),
        must=("overwrite", "nothing more for 20 s"),
        keep=("overwrite",),
        verdict="`terminal` is an open pipe, as a terminal at which nobody types.",
    ),
    ours=Show(
        _at_a_terminal(DDPTRAIN_SCRIPT), must=("failed first: EOFError",), keep=("ddptrain:", "input", "EOFError")
    ),
    avoided=(
        "The standard input of ranks is empty, so a question fails at once, with its line: see [Your torchrun "
        "script](start/script.md)."
    ),
    equal=(
        "For debugging torchrun is better: `torch.distributed.breakpoint()` works in its ranks, and not in those "
        "of ddptrain."
    ),
)
