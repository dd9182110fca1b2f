"""Ranks that stop without an end, and faults whose cause is elsewhere: the missing rank is named, not those waiting."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, Cli, Finished

WORKLOAD = """
import os, queue, signal, sys, threading, time
import torch
from torch import distributed

if os.environ.get("SLEEP_AT_IMPORT") == os.environ["RANK"]:
    time.sleep(60)


def load_batch(fault):
    if fault == "sleep":
        time.sleep(60)
    if fault == "compiled":
        import ctypes
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # calls hold the interpreter
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    if fault == "thread":
        batches = queue.Queue()
        threading.Thread(target=produce, name="producer", args=(batches,)).start()
        batches.get()
    if fault == "loader":
        list(torch.utils.data.DataLoader(Broken(), num_workers=1))


def produce(batches):
    raise ValueError("no such shard")


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise KeyError("shard-7")


def main(ctx, fault):
    ones = torch.ones(4)
    for step in range(8):
        ctx.log({"loss": 1.0}, step=step)
        if step == 2 and ctx.rank == 1:
            load_batch(fault)
        distributed.all_reduce(ones)
"""
CONFIG = """
name: hanging
workload: hanging:main
cluster: {ranks: 2, address: ADDRESS}
failure: {hang_timeout_s: 3, grace_s: 600}
"""

NO_WATCHDOG = ("--set", "failure.hang_timeout_s=null")

Train = Callable[..., tuple[Finished, dict[str, Any]]]


@pytest.fixture
def train(tmp_path: Path, run_cli: Cli, warm_cluster: str) -> Train:
    """Trains into a fault; the command would take too long if it waited for the grace to be over."""
    (tmp_path / "hanging.py").write_text(WORKLOAD)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("ADDRESS", warm_cluster))

    def run(fault: str, *more: str, **env: str) -> tuple[Finished, dict[str, Any]]:
        words = [word for name in env for word in ("--set", f"env.{name}='{env[name]}'")]
        ended = run_cli("train", "run.yaml", "--set", f"params.fault={fault}", *words, *more)
        (folder,) = (tmp_path / "runs").iterdir()
        return ended, json.loads((folder / "run.json").read_text())

    return run


def stacks(folder: Path) -> list[str]:
    (run,) = (folder / "runs").iterdir()
    return [(run / "artifacts" / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1)]


def assert_hung(ended: Finished, record: dict[str, Any], *words: str) -> None:
    assert (ended.rc, record["exit_code"], record["status"]) == (5, 5, "failed"), ended.stderr
    failure = record["failure"]
    assert (failure["rank"], failure["kind"]) == (1, "hang"), failure["message"]
    for word in words:
        assert word in failure["message"], failure["message"]
        assert word in ended.stderr
    assert "Traceback" not in ended.stderr


def test_missing_rank_is_named_with_what_befell_its_thread_and_not_the_one_that_waits_for_it(
    train: Train, tmp_path: Path
) -> None:
    ended, record = train("thread")
    assert_hung(
        ended,
        record,
        "it is in hanging.py:21 in load_batch while rank 0 waits for it in all_reduce",
        "its thread producer has ended with ValueError: no such shard",
    )
    assert "in produce" in record["failure"]["traceback"]
    waiting, missing = stacks(tmp_path)
    assert "in all_reduce" in waiting
    assert 'hanging.py", line 21 in load_batch' in missing


def test_rank_whose_interpreter_is_held_by_compiled_code_has_its_stack_taken(train: Train, tmp_path: Path) -> None:
    ended, record = train("compiled")
    assert_hung(ended, record, "hanging.py:17 in load_batch", "compiled code that does not let Python run")
    assert 'hanging.py", line 17 in load_batch' in stacks(tmp_path)[1]


def test_rank_that_never_comes_to_the_rendezvous_is_named(train: Train) -> None:
    ended, record = train("none", "--set", "cluster.start_timeout_s=5", SLEEP_AT_IMPORT="1")
    assert_hung(ended, record, "did not reach the rendezvous within 5 s", "hanging.py:7 in <module>", "rank 0 waits")


def test_collective_operation_that_times_out_is_blamed_on_the_rank_that_did_not_come(train: Train) -> None:
    ended, record = train("sleep", "--set", "dist.timeout_s=3", *NO_WATCHDOG)
    assert_hung(ended, record, "a collective operation timed out", "hanging.py:12 in load_batch", "while rank 0 waits")


def test_exception_in_a_dataloaders_worker_is_told_as_if_it_were_the_ranks_own(train: Train) -> None:
    ended, record = train("loader", *NO_WATCHDOG)
    assert ended.rc == 1
    failure = record["failure"]
    assert (failure["rank"], failure["type"]) == (1, "KeyError")
    assert failure["message"] == "'shard-7' (in DataLoader worker process 0)"
    assert failure["traceback"].index("in __getitem__") < failure["traceback"].index("in load_batch")


QUIET = """
import os, time
from pathlib import Path
from torch import distributed
import torch


def work(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def validate_on_all(ctx):
    log(ctx)
    work(float(os.environ["WORK_S"]))
    distributed.barrier()


def validate_on_one(ctx):
    log(ctx)
    if ctx.rank == 0:
        work(float(os.environ["WORK_S"]))
    distributed.barrier()


def log(ctx):
    for step in range(5):
        ctx.log({"loss": 1.0}, step=step)
        ctx.progress(step, 5)
        distributed.barrier()
"""


@pytest.fixture
def quiet(tmp_path: Path, run_cli: Cli, warm_cluster: str) -> Callable[..., Finished]:
    (tmp_path / "quiet.py").write_text(QUIET)

    def run(function: str, hang_timeout_s: float) -> Finished:
        content = {
            "workload": f"quiet:{function}",
            "cluster": {"ranks": 2, "address": warm_cluster},
            "failure": {"hang_timeout_s": hang_timeout_s},
            "env": {"WORK_S": str(5 * hang_timeout_s), "OMP_NUM_THREADS": "1"},
        }
        (tmp_path / "quiet.yaml").write_text(json.dumps(content))
        return run_cli("train", "quiet.yaml", "--run-id", "quiet")

    return run


@pytest.mark.long  # unit/driver/failure/test_watchdog.py: the same in a time of its own
@pytest.mark.parametrize("function", ["validate_on_all", "validate_on_one"])
def test_silent_validation_of_five_times_the_limit_is_no_hang(
    quiet: Callable[..., Finished], tmp_path: Path, function: str
) -> None:
    ended = quiet(function, 3.0)
    assert ended.rc == 0, ended.stderr
    assert not (tmp_path / "runs" / "quiet" / "artifacts" / "stacks").exists()


GROUPS = Path("/sys/fs/cgroup/memory")
EATER = """
from torch import distributed
import torch


def main(ctx):
    distributed.all_reduce(torch.ones(1))
    kept = []
    while ctx.rank == 1:
        kept.append(b"x" * (64 << 20))
    distributed.all_reduce(torch.ones(1))
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory control group with a limit."""
    group = GROUPS / f"ddptrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(3 << 29))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield group
    deadline = time.monotonic() + PATIENCE_S
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


def test_rank_that_the_kernel_kills_for_its_memory_is_told_with_the_limit(
    limited: Path, tmp_path: Path, run_cli: Cli
) -> None:
    (tmp_path / "eater.py").write_text(EATER)
    (tmp_path / "run.yaml").write_text("workload: eater:main\ncluster: {ranks: 2}\n")
    program = ("sh", "-c", f'echo $$ > {limited}/cgroup.procs; exec {sys.executable} -m ddptrain "$@"', "sh")
    ended = run_cli("train", "run.yaml", program=program)
    assert ended.rc == 1
    assert "killed by SIGKILL: out of memory (the memory limit of 1.5 GiB of its control group)" in ended.stderr
    assert "failed as a consequence: rank 0" in ended.stderr
