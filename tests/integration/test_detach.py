"""A run without a shell: it has a session of its own, is followed and stopped from others, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import PATIENCE_S, Cli

WORKLOAD = """
import os, time
import torch


def steps(ctx, n=2000):
    model = torch.nn.Linear(2, 1)
    resumed = ctx.resume(model=model)
    first = resumed.step if resumed else 0
    print("begins after step", first, os.environ.get("NIGHT"), flush=True)
    for step in range(first + 1, n + 1):
        time.sleep(0.05)
        print("step", step, flush=True)
        ctx.checkpoint(model=model, step=step, last=step == n)
"""


class Detached:
    """A folder with the workload, and the runs in it that go on without us."""

    def __init__(self, cli: Cli, cluster: str) -> None:
        self.cli = cli
        (cli.folder / "work.py").write_text(WORKLOAD)
        content = {
            "name": "night",
            "workload": "work:steps",
            "cluster": {"ranks": 1, "address": cluster},
            "checkpoint": {"metric": None, "every_epochs": None, "every_steps": 1000},
            "failure": {"grace_s": 20.0},
        }
        (cli.folder / "night.yaml").write_text(json.dumps(content))

    def start(self, *args: str) -> str:
        """The id of a run that was detached."""
        started = self.cli("train", "night.yaml", "--detach", *args)
        assert started.rc == 0, started.stderr
        return started.stdout.strip()

    def record(self, run: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.cli.folder / "runs" / run / "run.json").read_text())
        return record

    def driver(self, run: str) -> psutil.Process:
        return psutil.Process(self.record(run)["driver"]["pid"])

    def kill(self, run: str) -> None:
        os.kill(self.record(run)["driver"]["pid"], signal.SIGKILL)


@pytest.fixture
def detached(run_cli: Cli, warm_cluster: str) -> Detached:
    return Detached(run_cli, warm_cluster)


def test_detached_run_is_followed_shown_stopped_and_resumed_from_other_shells(detached: Detached) -> None:
    cli = detached.cli
    run = detached.start("--resume", "auto", "--set", "env.NIGHT=x")
    driver = detached.driver(run)
    assert os.getsid(driver.pid) == driver.pid != os.getsid(0)
    assert driver.terminal() is None and driver.status() != psutil.STATUS_ZOMBIE
    assert os.readlink(f"/proc/{driver.pid}/fd/0") == os.devnull
    following = cli.start("results", "logs", run, "--follow")
    following.wait_for("step 3")
    shown = cli("results", "show", "latest").stdout
    assert f"process {driver.pid} on" in shown and "running" in shown and "driver.log" in shown

    stopped = cli("stop", run[:-2], "--json")
    assert stopped.rc == 0, stopped.stderr
    assert json.loads(stopped.stdout) == {"run_id": run, "status": "preempted", "exit_code": 75}
    assert detached.record(run)["exit_code"] == 75
    assert detached.record(run)["failure"]["message"] == "ended by ddptrain stop"
    followed = following.finish()
    assert followed.rc == 0 and "begins after step 0 x" in followed.stdout
    assert _is_over(driver) and not (cli.folder / "runs" / run / ".stop.json").exists()
    saved = int(detached.record(run)["checkpoints"][0].removeprefix("step-"))
    assert f"step {saved}\n" in followed.stdout
    log = (cli.folder / "runs" / run / "driver.log").read_text()
    assert "starting a new run" in log and "step 1\n" in log and f"run {run} stopped (saved)" in log
    (asked,) = [line for line in _events(cli.folder / "runs" / run) if line["event"] == "stop_requested"]
    assert asked["now"] is False and "@" in asked["by"]

    again = cli("train", "night.yaml", "--detach", "--resume", "auto", "--set", "env.NIGHT=x", "--output", "json")
    begun = json.loads(again.stdout)
    assert begun["run_id"] == run and f"continuing run {run}, which was preempted" in begun["reason"]
    following = cli.start("results", "logs", begun["run_dir"], "--follow", "--lines", "5", cwd=Path("/"))
    following.wait_for(f"begins after step {saved}")
    ended = cli("stop", begun["run_dir"], "--now", cwd=Path("/"))
    assert ended.rc == 0, ended.stderr
    assert f"run {run} stopped (saved) (exit code 130): ended by ddptrain stop" in ended.stdout
    assert following.finish().rc == 0 and detached.record(run)["exit_code"] == 130
    late = cli("stop", run)
    assert late.rc == 0 and f"run {run} is not running, it has ended: stopped (saved)" in late.stdout


@pytest.mark.long
def test_logs_of_a_killed_driver_come_to_an_end_and_stop_says_that_it_is_gone(detached: Detached) -> None:
    run = detached.start("--run-id", "killed")
    assert run == "killed"
    following = detached.cli.start("results", "logs", run, "--follow")
    following.wait_for("step 2")
    second = detached.cli("train", "night.yaml", "--detach", "--resume", run)
    assert second.rc == 6 and "run killed is held by process" in second.stderr and second.stdout == ""
    detached.kill(run)
    assert following.finish().rc == 0
    stopped = detached.cli("stop", run)
    assert stopped.rc == 0 and "the driver has ended without a result (killed?)" in stopped.stdout


def test_what_keeps_a_run_from_beginning_is_said_as_without_detach(detached: Detached) -> None:
    (detached.cli.folder / "taken").mkdir()
    (detached.cli.folder / "taken" / "file").touch()
    refused = detached.cli("train", "night.yaml", "--detach", "--runs-dir", ".", "--run-id", "taken")
    assert refused.rc == 2 and refused.stdout == ""
    assert refused.stderr.startswith("ddptrain: error: ") and "is not a run's folder" in refused.stderr
    assert refused.stderr.count("\n") == 1
    wrong = detached.cli("train", "night.yaml", "--detach", "--ranks", "0")
    assert wrong.rc == 2 and "--ranks 0: cluster.ranks" in wrong.stderr


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def _is_over(process: psutil.Process) -> bool:
    """Whether it has ended within a moment; a container's init may never ask for how."""
    deadline = time.monotonic() + PATIENCE_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
