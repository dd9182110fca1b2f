"""An import error, once for each rank."""

from __future__ import annotations

from tests.pains.problem import Problem, Show, run

PROBLEM = Problem(
    name="import-error",
    title="An import error that is printed by every rank",
    happens="A missing package is the most common error of all; with 64 ranks there are 64 tracebacks.",
    threads=("pytorch/pytorch#162999",),
    files={
        "train.py": """
import torchaudiox


def train(ctx):
    pass


if __name__ == "__main__":
    train(None)
""",
        "train.yaml": "workload: train:train\ncluster: {ranks: 20}\n",
    },
    peer=Show(
        run("torchrun --standalone --nproc-per-node 20 train.py"),
        must=(r"(ModuleNotFoundError[\s\S]*){4}", "error_file: <N/A>"),
        keep=("ModuleNotFoundError", "Root Cause", "^  rank ", "exitcode", "traceback :"),
    ),
    ours=Show(
        run("ddptrain train train.yaml"),
        must=("failed first: ModuleNotFoundError: No module named 'torchaudiox'", "the same error: rank"),
        keep=("ddptrain:", "ModuleNotFoundError", "^run "),
        verdict=(
            "Tracebacks that come within half a second are printed once, so on a slow machine there are several, too. "
            "The last line names the module, and the ranks that lack it."
        ),
    ),
    avoided=(
        "The failure is reported in one line, with the ranks that have the same one; equal output of ranks is "
        "[grouped](output.md#many-ranks). A module of the workload "
        "itself that does not exist is found before anything starts: [exit code 2](troubleshooting/exit-2.md)."
    ),
)
