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
    assert f"hung: {found['message']}" in done.stderr
    return found


@pytest.mark.parametrize(
    ("fault", "at", "text"),
    [
        ("load", 150, "it is in work.py:8 in load while rank 0 waits for it in all_reduce"),
        pytest.param(
            *("validate", 30, "it is in work.py:8 in load while rank 0 waits for it in all_reduce"),
            marks=pytest.mark.long,
        ),
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


ALONE = """
    import torch
    from torch import distributed


    def train_alone(ctx, model, steps):
        for _ in range(steps):
            model(torch.ones(2, 4)).mean().backward()


    def train(ctx, call):
        if call == "resume" and ctx.rank == 0:
            ctx.resume(model=torch.nn.Linear(4, 1))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        if call == "checkpoint":
            for step in range(1, 4):
                train_alone(ctx, model, 1)
                if ctx.rank == 0:
                    ctx.checkpoint(model=model, step=step)
        if call == "mean" and ctx.rank == 0:
            ctx.mean(1.0)
        if call == "mean":
            train_alone(ctx, model, 2)
        if call == "returned" and ctx.rank == 0:
            ctx.mean(1.0)
"""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "resume",
            r"it is in ctx\.resume at work\.py:13 in train, which all ranks must call while rank 1 waits for it",
        ),
        pytest.param(
            *(
                "checkpoint",
                r"it is in ctx\.checkpoint at work\.py:19 in train, which all ranks must call while rank 1",
            ),
            marks=pytest.mark.long,
        ),
        ("mean", r"it is in ctx\.mean at work\.py:21 in train, which all ranks must call while rank 1 waits for it"),
    ],
)
def test_ctx_method_that_only_one_rank_calls_is_named(
    project: Project, shared_cluster: str, call: str, text: str
) -> None:
    limits = {"hang_timeout_s": 2, "grace_s": 5}
    config = project.function(ALONE, params={"call": call}, failure=limits, checkpoint={"every_steps": 1})
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=5)
    found = project.record()["failure"]
    assert (found["rank"], found["kind"]) == (0, "hang")
    assert re.search(text, found["message"]), found["message"]


def test_rank_that_returns_while_others_are_in_a_ctx_method_is_the_cause(project: Project, shared_cluster: str) -> None:
    config = project.function(ALONE, params={"call": "returned"}, failure={"hang_timeout_s": 2, "grace_s": 5})
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=1)
    assert "returned from the workload" in project.record()["failure"]["message"]


# Runs a command on a terminal of its own; what it shows is written to stdout.
ON_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def test_live_display_says_for_how_long_no_rank_has_reported(project: Project, shared_cluster: str) -> None:
    config = project.function(WORK, params={"fault": "load", "at": 1}, failure={"hang_timeout_s": 4, "grace_s": 60})
    terminal = (sys.executable, "-c", ON_TERMINAL, *INSTALLED)
    options = ("--cluster", shared_cluster, "--ranks", "2", "--output", "live")
    done = project.cli("train", config, *options, program=terminal, env={"TERM": "xterm", "COLUMNS": "160"})
    assert done.rc == 5, done.stdout
    assert re.search(r"training \S+ no report for [234] s \(limit 4 s\)", done.stdout), done.stdout


ABORTS = """
    import ctypes, os, sys, threading, time
    import torch
    import torch.distributed as dist

    NCCL = "[rank0]:[E1124 06:00:00.1 ProcessGroupNCCL.cpp:700] "
    THROWN = "terminate called after throwing an instance of 'c10::DistBackendError'\\n  what():  [PG ID 0 Rank 0] "
    TEXTS = {
        "nccl_timeout": NCCL + "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)\\n"
        + THROWN + "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)\\n",
        "nccl2_timeout": NCCL + "[TC][rank=0][name=default_pg] Operation timed out after 10000 ms\\n"
        + NCCL + "[TC][rank=0][name=default_pg] Aborting process on rank 0 due to timeout - timeout watchdog detected "
        "operation timeout\\n",
        "nccl_remote": THROWN + "NCCL error: remote process exited or there was a network error, NCCL version 2\\n",
        "nccl2_remote": NCCL + "[TC][rank=0] Aborting process on rank 0 due to error - nccl hit async error: remote "
        "process exited or there was a network error\\n",
        "unknown": "",
        "dist_error": "",
    }


    def fail():
        time.sleep(1.0)
        raise ValueError("bad sample")


    def abort_in_a_thread_of_c():
        time.sleep(0.5)
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)


    def train(ctx, text, other):
        ctx.progress(1, 10)
        dist.all_reduce(torch.ones(1))
        if ctx.rank == 0:
            sys.stderr.write(TEXTS[text])
            if text == "dist_error":
                raise dist.DistBackendError("NCCL error in: nccl2/ProcessGroupNCCL.cpp:9, a text of a later version")
            if text == "unknown":
                threading.Thread(target=abort_in_a_thread_of_c).start()
                dist.all_reduce(torch.ones(1))
            time.sleep(0.5)
            os.abort()
        if other == "hangs":
            time.sleep(90)
        if other == "fails":
            fail()
"""

LONG = pytest.mark.long  # the texts of the other of NCCL's two watchdogs


@pytest.mark.parametrize(
    ("text", "other", "rc", "cause"),
    [
        ("nccl_timeout", "hangs", 5, "hung: a collective operation timed out, it is in work.py"),
        pytest.param(
            "nccl2_timeout", "hangs", 5, "hung: a collective operation timed out, it is in work.py", marks=LONG
        ),
        ("unknown", "hangs", 5, "hung: a collective operation timed out, it is in work.py"),
        pytest.param(
            *("nccl_remote", "returns", 1, "failed first: returned from the workload while rank 0 waited for it"),
            marks=LONG,
        ),
        ("nccl2_remote", "returns", 1, "failed first: returned from the workload while rank 0 waited for it"),
        pytest.param(
            *("nccl2_remote", "fails", 1, "failed first: ValueError: bad sample (failed as a consequence: rank 0)"),
            marks=LONG,
        ),
        ("dist_error", "fails", 1, "failed first: ValueError: bad sample (failed as a consequence: rank 0)"),
    ],
)
def test_rank_that_is_aborted_in_a_collective_is_not_the_cause(
    project: Project, shared_cluster: str, text: str, other: str, rc: int, cause: str
) -> None:
    failure = {"hang_timeout_s": 60, "grace_s": 60}
    config = project.function(ABORTS, params={"text": text, "other": other}, failure=failure)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=rc)
    assert project.record()["failure"]["rank"] == 1
    assert re.search(rf"failed: rank 1 on \S+ {re.escape(cause)}", done.stderr), done.stderr


def test_rank_that_aborts_alone_is_the_cause_with_what_nccl_says(project: Project, shared_cluster: str) -> None:
    config = project.function(ABORTS, params={"text": "nccl2_remote", "other": "hangs"}, failure={"grace_s": 1})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=1)
    assert "killed by SIGABRT: error - nccl hit async error: remote process exited" in done.stderr


def test_rank_whose_clock_is_set_back_still_reports_progress(project: Project, shared_cluster: str) -> None:
    code = """
        import time
        import torch.distributed as dist


        def train(ctx):
            for step in range(40):
                if step == 2:
                    right = time.time_ns
                    time.time_ns = lambda: right() - 3600 * 10**9
                ctx.progress(step, 40)
                dist.barrier()
                time.sleep(0.12)
    """
    config = project.function(code, failure={"hang_timeout_s": 2})
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
