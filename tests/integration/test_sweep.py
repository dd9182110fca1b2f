"""`ddptrain sweep` with real processes: trials at the same time on a shared cluster, early ends, kills and signals."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, Cli
from tests.servers.seaweed import bucket_of, seaweed

WORKLOAD = """
import time
import torch


def main(ctx, lr: int = 1, steps: int = 4, pause_s: float = 0.0):
    if lr == 0:
        raise ValueError("lr is 0")
    model = torch.nn.Linear(1, 1)
    resumed = ctx.resume(model=model)
    for step in range((resumed.step if resumed else 0) + 1, steps + 1):
        time.sleep(pause_s)
        loss = (lr - 3) ** 2 + 1 / step
        ctx.log({"loss": loss}, step=step)
        ctx.checkpoint(model=model, step=step, metrics={"loss": loss}, last=step == steps)
"""


@pytest.fixture
def project(tmp_path: Path, warm_cluster: str) -> Path:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    (tmp_path / "cluster").write_text(warm_cluster)
    return tmp_path


def write_config(
    folder: Path, points: list[int], params: dict[str, Any] | None = None, results_dir: str = "runs", **sweep: Any
) -> Path:
    section = {"space": {"params.lr": points}, "search": "grid", "metric": "loss", "parallel": 2, **sweep}
    config = {
        "workload": "mine:main",
        "params": params or {},
        "results": {"dir": results_dir},
        "cluster": {"address": (folder / "cluster").read_text(), "ranks": 1},
        "checkpoint": {"every_steps": 1, "keep": 1, "metric": "loss"},
        "sweep": section,
    }
    path = folder / "mine.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def shown(cli: Cli, name: str = "s", **options: Any) -> dict[str, Any]:
    """What `results show` says of a sweep, or of a run."""
    done = cli("results", "show", name, "--json", **options)
    assert done.rc == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_six_trials_share_a_cluster_and_the_best_one_can_be_trained(project: Path, run_cli: Cli) -> None:
    config = write_config(project, [5, 4, 3, 2, 1, 0])
    done = run_cli("sweep", config, "--sweep-id", "s", "--output", "json")
    assert done.rc == 0, done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    end = objects[-1]
    assert (end["event"], end["status"], end["best"]["params"]) == ("sweep_finished", "succeeded", {"params.lr": 3})
    ended = [each for each in objects if each["event"] == "trial_ended"]
    values = {each["params"]["params.lr"]: each["value"] for each in ended}
    assert values == {5: 4.25, 4: 1.25, 3: 0.25, 2: 1.25, 1: 4.25, 0: None}
    (failed,) = [each for each in ended if each["state"] == "failed"]
    assert failed["error"] == "ValueError: lr is 0"
    run = shown(run_cli, "s/2")
    assert (run["status"], run["checkpoints"]) == ("succeeded", ["step-4"])
    log = (project / "runs" / "s" / "s-0002" / "logs" / "ddptrain.log").read_text()
    assert "run=s-0002" in log and "run=s-0001" not in log

    best = run_cli("train", project / "runs" / "s" / "best.yaml", "--run-id", "again")
    assert best.rc == 0, best.stderr
    assert shown(run_cli, "again")["last_metrics"] == {"loss": 0.25}
    retrained = run_cli("retrain", project / "runs" / "s" / "best.yaml")
    assert retrained.rc == 0, retrained.stderr
    assert "retrain mine promoted: version 1 is the champion (loss 0.25" in retrained.stdout


@pytest.mark.long
def test_killed_at_random_moments_every_result_counts_once(project: Path, run_cli: Cli) -> None:
    config = write_config(project, [6, 5, 4, 3, 2, 1], {"steps": 12, "pause_s": 0.1})
    chance = random.Random(4)
    resume: list[str] = []
    for _ in range(3):
        running = run_cli.start("sweep", config, "--sweep-id", "s", *resume)
        deadline = time.monotonic() + PATIENCE_S
        while not list(project.glob("runs/s/*/checkpoints/latest")) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(chance.uniform(0.1, 1.5))
        running.kill_group()
        resume = ["--resume"]
    done = run_cli("sweep", config, "--sweep-id", "s", "--resume")
    assert done.rc == 0, done.stderr
    trials = shown(run_cli)["trials"]
    assert [(each["number"], each["params"]["params.lr"]) for each in trials] == list(enumerate([6, 5, 4, 3, 2, 1]))
    assert [each["value"] for each in trials] == pytest.approx([(lr - 3) ** 2 + 1 / 12 for lr in (6, 5, 4, 3, 2, 1)])
    attempts = [shown(run_cli, f"s/{number}")["attempts"] for number in range(6)]
    resumed = [attempt["resumed_from"] for each in attempts for attempt in each[1:]]
    assert resumed and any(step is not None for step in resumed)  # from a checkpoint, not from the start


@pytest.mark.long
@pytest.mark.slow
def test_a_sweep_in_a_store_is_resumed_on_another_machine(project: Path, run_cli: Cli, tmp_path: Path) -> None:
    place = "s3://bucket/runs"
    config = write_config(project, [5, 4, 3], {"steps": 40, "pause_s": 0.1}, results_dir=place)
    (tmp_path / "store").mkdir()
    with seaweed(tmp_path / "store", "bucket") as store:
        first, second = (
            {
                **store,
                "XDG_STATE_HOME": str(tmp_path / name / "state"),
                "XDG_CACHE_HOME": str(tmp_path / name / "cache"),
            }
            for name in ("first", "second")
        )
        running = run_cli.start("sweep", config, "--sweep-id", "s", env=first)
        running.wait_for("trial 0 complete")
        locked = run_cli("sweep", config, "--sweep-id", "s", "--resume", env=second)
        assert locked.rc == 6 and "held by process" in locked.stderr, locked.stderr
        running.kill_group()

        done = run_cli("sweep", config, "--resume", env=second)
        assert done.rc == 0, done.stderr
        assert f"best: trial 2, loss 0.025: {place}/s/best.yaml" in done.stdout + done.stderr
        trials = json.loads(bytes(bucket_of(store, "bucket").get("runs/s/sweep.json").bytes()))["trials"]
        assert [(each["params"]["params.lr"], each["state"]) for each in trials] == [
            (lr, "complete") for lr in (5, 4, 3)
        ]
        assert [each["value"] for each in trials] == pytest.approx([(lr - 3) ** 2 + 1 / 40 for lr in (5, 4, 3)])
        listed = json.loads(run_cli("results", "list", "--runs-dir", f"{place}/s", "--json", env=second).stdout)
        assert {run["run_id"]: run["status"] for run in listed} == dict.fromkeys(
            ("s-0000", "s-0001", "s-0002"), "succeeded"
        )
        assert not list(Path(second["XDG_STATE_HOME"]).glob("ddptrain/runs/*/s-*")), "everything is in the store"
        again = run_cli("train", f"{place}/s/best.yaml", "--run-id", "again", env=second)
        assert again.rc == 0, again.stderr
