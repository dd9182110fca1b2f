"""A ctx method that only some ranks call ends the run within seconds, with its name; slow ranks are waited for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Finished

WORKLOAD = """
import time
import torch
from torch import distributed


def model_of(ctx):
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))


def train(ctx, model, steps=1):
    for _ in range(steps):
        model(torch.ones(2, 4)).mean().backward()


def checkpoint_and_train(ctx):
    model = model_of(ctx)
    for step in range(1, 1000):
        train(ctx, model)
        if ctx.rank == 0:
            ctx.checkpoint(model=model, step=step, metrics={})


def checkpoint_at_the_end(ctx):
    model = model_of(ctx)
    train(ctx, model)
    if ctx.rank == 0:
        ctx.checkpoint(model=model, step=40, metrics={})
    else:
        train(ctx, model, 2)


def checkpoint_and_barrier(ctx):
    model = model_of(ctx)
    if ctx.rank == 0:
        ctx.checkpoint(model=model, step=1, metrics={})
        ctx.checkpoint(model=model, step=2, metrics={})
    distributed.barrier()


def mean_and_train(ctx):
    model = model_of(ctx)
    train(ctx, model, 3)
    if ctx.rank == 0:
        ctx.mean(1.0)
    train(ctx, model)


def mean_later_and_train(ctx):
    model = model_of(ctx)
    for step in range(5):
        if ctx.rank == 0 or step < 3:
            ctx.mean(1.0)
        train(ctx, model)


def mean_and_end(ctx):
    if ctx.rank == 0:
        ctx.mean(1.0)


def all_finite_and_barrier(ctx):
    if ctx.rank == 0:
        ctx.all_finite(1.0)
    distributed.barrier()


def all_finite_and_mean(ctx):
    ctx.checkpoint(model=torch.nn.Linear(1, 1), step=1, metrics={})
    if ctx.rank == 0:
        ctx.rank_zero_first().__enter__()
        ctx.resume(model=torch.nn.Linear(1, 1))
    ctx.mean(1.0)


def resume_and_train(ctx):
    model = torch.nn.Linear(4, 1)
    if ctx.rank == 0:
        ctx.resume(model=model)
    train(ctx, model_of(ctx))


def first_and_train(ctx):
    model = model_of(ctx)
    if ctx.rank == 1:
        with ctx.rank_zero_first():
            pass
    train(ctx, model)


def slow(ctx):
    model = model_of(ctx)
    wait(ctx)
    ctx.resume(model=model)
    wait(ctx)
    train(ctx, model)
    wait(ctx)
    assert ctx.mean(ctx.rank) == 0.5
    ctx.checkpoint(model=model, step=1, metrics={})
    wait(ctx)
    assert ctx.all_finite(1.0)
    ctx.checkpoint(model=model, step=2, metrics={})
    with ctx.rank_zero_first():
        wait(ctx, rank=0)
    wait(ctx)
    train(ctx, model)
    ctx.checkpoint(model=model, step=3, metrics={})
    wait(ctx)


def wait(ctx, rank=1):
    if ctx.rank == rank:
        time.sleep(5.0)
"""
WITHIN_S = 60.0  # far below torch's time-outs and the limit of the watchdog


def run(tmp_path: Path, cli: Cli, cluster: str, function: str, **checkpoint: Any) -> tuple[Finished, dict[str, Any]]:
    (tmp_path / "uncalled.py").write_text(WORKLOAD)
    content = {
        "workload": f"uncalled:{function}",
        "cluster": {"ranks": 2, "address": cluster},
        "failure": {"grace_s": 5.0},
        "checkpoint": {"metric": None, **checkpoint},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    began = time.monotonic()
    ended = cli("train", "run.yaml", "--run-id", "it")
    assert time.monotonic() - began < WITHIN_S
    record: dict[str, Any] = json.loads((tmp_path / "runs" / "it" / "run.json").read_text())
    return ended, record


@pytest.mark.parametrize(
    ("function", "waits", "rank"),
    [
        ("checkpoint_and_train", "rank 0 is in ctx.checkpoint at step 2, which rank 1 has not called", 0),
        ("checkpoint_at_the_end", "rank 0 is in ctx.checkpoint at step 40, which rank 1 has not called", 0),
        ("checkpoint_and_barrier", "rank 0 is in ctx.checkpoint at step 2, which rank 1 has not called", 0),
        ("mean_and_train", "rank 0 is in ctx.mean, which rank 1 has not called", 0),
        ("mean_later_and_train", "rank 0 is in ctx.mean, which rank 1 has not called", 0),
        ("mean_and_end", "rank 0 is in ctx.mean, which rank 1 has not called", 0),
        ("all_finite_and_barrier", "rank 0 is in ctx.all_finite, which rank 1 has not called", 0),
        ("all_finite_and_mean", "rank 0 is in ctx.resume, which rank 1 has not called", 0),
        ("resume_and_train", "rank 0 is in ctx.resume, which rank 1 has not called", 0),
        ("first_and_train", "rank 1 is in ctx.rank_zero_first, which rank 0 has not called", 1),
    ],
)
def test_call_that_only_one_rank_makes_is_named(
    tmp_path: Path, run_cli: Cli, warm_cluster: str, function: str, waits: str, rank: int
) -> None:
    ended, record = run(tmp_path, run_cli, warm_cluster, function)
    assert ended.rc == 1, ended.stderr
    failure = record["failure"]
    assert (failure["rank"], failure["message"]) == (rank, f"{waits}; all ranks must call it"), failure["message"]
    assert f"{waits}; all ranks must call it" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_synchronous_checkpoint_is_named_at_its_own_step(tmp_path: Path, run_cli: Cli, warm_cluster: str) -> None:
    ended, record = run(tmp_path, run_cli, warm_cluster, "checkpoint_and_train", asynchronous=False)
    assert ended.rc == 1, ended.stderr
    assert "rank 0 is in ctx.checkpoint at step 1, which rank 1 has not called" in record["failure"]["message"]


@pytest.mark.slow
def test_ranks_that_are_only_slow_are_waited_for(tmp_path: Path, run_cli: Cli, warm_cluster: str) -> None:
    ended, _ = run(tmp_path, run_cli, warm_cluster, "slow")
    assert ended.rc == 0, ended.stderr
    assert not (tmp_path / "runs" / "it" / "artifacts" / "stacks").exists()
