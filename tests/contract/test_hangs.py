"""A rank that makes no progress is named, with its place in the code, and not the ranks that wait for it."""

from __future__ import annotations

import re
import sys

import pytest

from tests.contract.conftest import INSTALLED, Project

WORK = """
    import os, signal, time
    import torch
    import torch.distributed as dist


    def load():
        time.sleep(90)


    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)


    def validate(ctx):
        if ctx.rank == 1:
            load()
        dist.all_reduce(torch.ones(1))


    def item(ctx):
        # As loss.item() waits for a GPU: the main thread is in no call of torch.distributed, and it uses the CPU.
        # The ranks wait for each other in two operations, because they begin them in different order.
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        pending = dist.all_reduce(torch.ones(1), group=groups[ctx.rank], async_op=True)
        while not pending.is_completed():
            pass


    def train(ctx, fault, at):
        for step in range(200):
            ctx.log({"loss": 1.0}, step=step)
            if step == at:
                if fault == "item":
                    item(ctx)
                elif fault == "validate":
                    validate(ctx)
                elif ctx.rank == 1:
                    globals()[fault]()
            dist.all_reduce(torch.ones(1))
"""


def failure(project: Project, cluster: str, fault: str, at: int) -> dict[str, object]:
    config = project.function(WORK, params={"fault": fault, "at": at}, failure={"hang_timeout_s": 2, "grace_s": 60})
    done = project("train", config, "--cluster", cluster, "--ranks", "2", rc=5)
    found: dict[str, object] = project.record()["failure"]
    assert f"ddptrain: rank {found['rank']} hung: {found['message']}" in done.stderr
    return found


@pytest.mark.parametrize(
    ("fault", "at", "text"),
    [
        ("load", 1, "it is in work.py:8 in load while rank 0 waits for it in all_reduce"),
        ("load", 150, "it is in work.py:8 in load while rank 0 waits for it in all_reduce"),
        ("validate", 30, "it is in work.py:8 in load while rank 0 waits for it in all_reduce"),
        ("stop", 3, "its process is stopped (SIGSTOP) while rank 0 waits for it in all_reduce"),
    ],
)
def test_missing_rank_is_named(project: Project, shared_cluster: str, fault: str, at: int, text: str) -> None:
    found = failure(project, shared_cluster, fault, at)
    message = str(found["message"])
    assert (found["rank"], found["kind"]) == (1, "hang")
    assert re.fullmatch(rf"no progress for \d+ s, {re.escape(text)} \(stacks: artifacts/stacks/\)", message), message


def test_ranks_that_wait_for_a_pending_collective_outside_of_torch_hang(project: Project, shared_cluster: str) -> None:
    message = str(failure(project, shared_cluster, "item", 1)["message"])
    found = re.match(r"no progress for (\d+) s, although it uses the CPU, it is in work.py:\d+ in item", message)
    assert found is not None, message
    assert int(found[1]) < 10, "CPU use alone counts for six times the limit, 12 s"
    assert re.search(r"while rank [01] waits for it in all_reduce", message), message


# Runs a command on a terminal of its own; what it shows is written to stdout.
ON_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def test_live_display_says_for_how_long_no_rank_has_reported(project: Project, shared_cluster: str) -> None:
    config = project.function(WORK, params={"fault": "load", "at": 1}, failure={"hang_timeout_s": 4, "grace_s": 60})
    terminal = (sys.executable, "-c", ON_TERMINAL, *INSTALLED)
    options = ("--cluster", shared_cluster, "--ranks", "2", "--output", "live")
    done = project.cli("train", config, *options, program=terminal, env={"TERM": "xterm", "COLUMNS": "160"})
    assert done.rc == 5, done.stdout
    assert re.search(r"training \S+ no report for [234] s \(limit 4 s\)", done.stdout), done.stdout
