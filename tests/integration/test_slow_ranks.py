"""A slow rank is named, and moves to another host with the next checkpoint; no step is repeated or lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.results.system.system_file import read_system
from tests.conftest import PATIENCE_S, Cli

WORKLOAD = """
import time
import torch

def steps(ctx):
    model = torch.nn.Linear(4, 1)
    resumed = ctx.resume(model=model)
    ddp = ctx.prepare(model)
    step, last = resumed.step if resumed else 0, None
    print("attempt", ctx.attempt, "begins after step", step, flush=True)
    while step < (last or 300):
        if last is None and ctx.attempt == 2:
            last = step + 5
        step += 1
        time.sleep(0.2 if ctx.attempt == 1 and ctx.rank == 1 else 0.02)
        ddp(torch.ones(4, 4)).sum().backward()
        ctx.log({"loss": 1.0}, step=step)
        ctx.checkpoint(model=model, step=step, last=step == last)
"""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster with two slots on one host and one on another: both are addresses of this machine."""
    module = [sys.executable, "-P", "-m"]
    card = tmp_path / "scheduler" / "scheduler.json"
    card.parent.mkdir()
    programs = [
        ["ddptrain.clusters.scheduler.scheduler_process", "--folder", str(card.parent), "--host", "127.0.0.1"],
        *(
            ["ddptrain.worker", "--scheduler-file", str(card), "--gpus", "none", "--slots", slots, "--host", host]
            for slots, host in (("2", "127.0.0.1"), ("1", "127.0.0.2"))
        ),
    ]
    started = [subprocess.Popen([*module, *program], cwd=tmp_path, start_new_session=True) for program in programs]
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not card.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield str(json.loads(card.read_text())["address"])
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(PATIENCE_S)


def test_slow_rank_moves_to_another_host(run_cli: Cli, two_hosts: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    config = {
        "workload": "work:steps",
        "cluster": {"address": two_hosts, "ranks": 2},
        "failure": {"slow": "replace"},
        "system": {"every_s": 0.5},
        "checkpoint": {"every_steps": 1_000_000, "every_epochs": None, "metric": None},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    done = run_cli("train", "run.yaml")
    assert done.rc == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    (slow,) = record["slow_ranks"]
    assert (slow["attempt"], slow["rank"]) == (1, 1)
    assert slow["own_s"] >= 0.2
    first, second = record["attempts"]
    # rank 1 was on the first host, with rank 0; now one rank is on each host.
    assert [rank["node_rank"] for rank in first["ranks"]] == [0, 0]
    assert [rank["node_rank"] for rank in second["ranks"]] == [0, 1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["rank"] == 0]
    assert steps == list(range(1, len(steps) + 1))
    sampled = read_system(run / "system.jsonl")
    assert {line.rank for line in sampled} == {None, 0, 1}
    assert any("cpu_percent" in line.values for line in sampled if line.rank == 1)
