"""Restarts and resumes with real processes: what was saved is not lost, and the weights are as undisturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.conftest import Cli, Finished, Running
from tests.servers.dask_cluster import DaskCluster, up_cluster

__all__ = ["up_cluster"]

WORKLOAD = '''
import os, signal, time
import torch


def wait_until_home(ctx, step):
    """Return once the checkpoint is in the run directory; where that is not to be seen, a file `home` tells."""
    places = [f"{runs}/{ctx.run_id}/checkpoints/step-{step}" for runs in ("runs", "buckets/bucket/some/runs")]
    while step and not any(map(os.path.exists, [*(f"{place}/checkpoint.json" for place in places), "home"])):
        time.sleep(0.02)


def steps(ctx, epochs=4, die_in=0, how="kill", always=False, wait_for=""):
    """Trains from where the last checkpoint left off; rank 1 dies in an epoch, in the first attempt or always."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    resumed = ctx.resume(model=model, optimizer=optimizer)
    first = int(resumed.epoch) + 1 if resumed else 1
    print("attempt", ctx.attempt, "begins with epoch", first, "note", resumed.data["note"] if resumed else None)
    model = torch.nn.parallel.DistributedDataParallel(model)
    for epoch in range(first, epochs + 1):
        if epoch == die_in and ctx.rank == 1 and (ctx.attempt == 1 or always):
            wait_until_home(ctx, epoch - 1)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise ValueError("a mistake")
            if how == "exit":
                raise SystemExit(42)
        optimizer.zero_grad()
        loss = model(torch.full((8, 4), float(ctx.rank + epoch))).pow(2).mean()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss.detach()}, step=epoch, epoch=epoch)
        if epoch == die_in and wait_for and (ctx.attempt == 1 or always):
            print("waiting", flush=True)
            while not os.path.exists(wait_for):
                time.sleep(0.05)
        ctx.checkpoint(model=model, optimizer=optimizer, step=epoch, epoch=epoch, metrics={}, note=f"of {epoch}")
'''


class Trainer:
    """A folder with the workload, and the runs that come of it on a cluster that is up."""

    def __init__(self, cli: Cli, cluster: str) -> None:
        self.cli = cli
        self.cluster: dict[str, object] = {
            "ranks": 2,
            "address": cluster,
            "wait_s": 90.0,
        }  # for a killed driver's slots
        (cli.folder / "work.py").write_text(WORKLOAD)

    def config(self, max_restarts: int = 0, **params: object) -> Path:
        path = self.cli.folder / "steps.yaml"
        failure = {"max_restarts": max_restarts, "grace_s": 2.0}
        content = {"workload": "work:steps", "params": params, "cluster": self.cluster, "failure": failure}
        path.write_text(json.dumps({**content, "checkpoint": {"metric": None}}))
        return path

    def train(self, *args: str, max_restarts: int = 0, **params: object) -> Finished:
        return self.cli("train", self.config(max_restarts, **params), *args)

    def start(self, *args: str, **params: Any) -> Running:
        return self.cli.start("train", self.config(**params), *args)

    def record(self, run: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.cli.folder / "runs" / run / "run.json").read_text())
        return record

    def losses(self, run: str) -> list[tuple[Any, ...]]:
        """What was logged of each epoch, newest last where a step was taken twice."""
        text = (self.cli.folder / "runs" / run / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        found = {(line["step"], line["rank"], name): line[name] for line in lines for name in line if "loss" in name}
        return sorted((*key, value) for key, value in found.items())

    def weights(self, run: str, step: int = 4) -> dict[str, bytes]:
        file = self.cli.folder / "runs" / run / "checkpoints" / f"step-{step}" / "model.safetensors"
        return {name: value.tobytes() for name, value in load_file(file).items()}


@pytest.fixture
def trainer(run_cli: Cli, warm_cluster: str) -> Trainer:
    return Trainer(run_cli, warm_cluster)


def test_killed_rank_is_started_again_and_the_weights_are_those_of_an_undisturbed_run(trainer: Trainer) -> None:
    assert trainer.train("--run-id", "undisturbed").rc == 0
    trainer.cluster = {"ranks": 2}  # of its own
    ended = trainer.train("--run-id", "killed", max_restarts=1, die_in=3)
    assert ended.rc == 0, ended.stderr
    assert "failed first: killed by SIGKILL" in ended.stderr
    assert "starting the ranks again, with the checkpoint of step 2, epoch 2 (restart 1 of 1)" in ended.stderr
    assert "[rank 1] attempt 2 begins with epoch 3 note of 2" in ended.stdout
    assert [attempt["outcome"] for attempt in trainer.record("killed")["attempts"]] == ["failed", "succeeded"]
    assert trainer.record("killed")["checkpoints"] == ["step-4", "step-3", "step-2"]
    assert trainer.weights("killed") == trainer.weights("undisturbed")
    log = (trainer.cli.folder / "runs/killed/logs/rank-0.log").read_text()
    assert "attempt 1 begins with epoch 1" in log and "attempt 2 begins with epoch 3" in log


def test_mistake_in_the_code_is_not_tried_again_and_again(trainer: Trainer) -> None:
    ended = trainer.train("--run-id", "broken", max_restarts=5, die_in=2, how="raise", always=True)
    assert ended.rc == 1
    assert "not started again: the same failure at the same step twice in a row" in ended.stderr
    assert len(trainer.record("broken")["attempts"]) == 2


def test_run_of_a_killed_driver_is_resumed_and_says_from_where(trainer: Trainer) -> None:
    assert trainer.train("--run-id", "undisturbed").rc == 0
    go = str(trainer.cli.folder / "go")
    running = trainer.start("--run-id", "night", die_in=3, how="wait", wait_for=go)
    running.wait_for("waiting")
    os.kill(running.popen.pid, signal.SIGKILL)
    running.finish()
    refused = trainer.train("--resume", "night", epochs=5, die_in=3, how="wait", wait_for=go)
    assert refused.rc == 2
    assert "params.epochs not given (now 5)" in refused.stderr
    resumed = trainer.train("--resume", "night", die_in=3, how="wait", wait_for=go)
    assert resumed.rc == 0, resumed.stderr
    assert "continuing run night, which failed (the driver has ended without a result (killed?))" in resumed.stderr
    assert "resuming with the checkpoint of step 2, epoch 2" in resumed.stderr
    assert "[rank 0] attempt 2 begins with epoch 3 note of 2" in resumed.stdout
    assert "attempt 1" not in resumed.stdout  # what was shown before is not shown again
    assert trainer.weights("night") == trainer.weights("undisturbed")
    assert [attempt["outcome"] for attempt in trainer.record("night")["attempts"]] == ["failed", "succeeded"]


def test_auto_resumes_what_failed_and_starts_afresh_after_a_success(trainer: Trainer) -> None:
    afresh = trainer.train("--resume", "auto", die_in=3)
    assert afresh.rc == 1 and "starting a new run: there is no run named steps to resume" in afresh.stderr
    (failed,) = os.listdir(trainer.cli.folder / "runs")
    resumed = trainer.train("--resume", "auto", die_in=3)
    assert resumed.rc == 0 and f"continuing run {failed}" in resumed.stderr
    again = trainer.train("--resume", "auto", die_in=3)
    assert again.rc == 1 and f"starting a new run: the last run of this name, {failed}, has succeeded" in again.stderr
    other = trainer.train("--resume", "auto", epochs=3)
    assert (
        other.rc == 0
        and "starting a new run: run " in other.stderr
        and "params.die_in 3 (now not given)" in other.stderr
    )


def test_driver_whose_run_was_taken_over_on_another_host_ends_and_leaves_the_run_alone(trainer: Trainer) -> None:
    running = trainer.start("--run-id", "night", die_in=3, how="wait", wait_for=str(trainer.cli.folder / "go"))
    running.wait_for("waiting")
    root = trainer.cli.folder / "runs" / "night"
    record = trainer.record("night")
    (root / "run.lock").write_text("process 7 on far\n")  # as a driver does that does not see our lock
    ended = running.finish()
    assert ended.rc == 6 and "run night has been taken over by process 7 on far" in ended.stderr
    assert trainer.record("night")["status"] == record["status"] == "running"
    assert (root / "run.lock").read_text() == "process 7 on far\n"


def _can_unshare() -> bool:
    command = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not _can_unshare(), reason="needs root and mount namespaces")
def test_worker_with_another_file_system_is_brought_the_checkpoint(trainer: Trainer, up_cluster: DaskCluster) -> None:
    folder = trainer.cli.folder
    scratch, runs = folder / "hidden", folder / "runs"
    scratch.mkdir()
    runs.mkdir()
    hide = f'mount -t tmpfs none {scratch} && mount -t tmpfs none {runs} && exec "$@"'
    up_cluster.add_worker("unshare", "--mount", "bash", "-c", hide, "-", scratch=scratch)
    running = trainer.start("--run-id", "far", "--cluster", up_cluster.address, max_restarts=1, die_in=3)
    while running.popen.poll() is None and not (runs / "far/checkpoints/step-2/checkpoint.json").exists():
        time.sleep(0.05)
    (folder / "home").touch()
    ended = running.finish()
    assert ended.rc == 0, ended.stderr
    assert "[rank 1] attempt 2 begins with epoch 3 note of 2" in ended.stdout
