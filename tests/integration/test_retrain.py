"""`ddptrain retrain` with real processes: what several starts do together, and what survives a kill in each stage."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Finished, Running
from tests.servers.seaweed import seaweed
from tests.support.command import wait_until

WORKLOAD = """
import json, os, time
import torch


def main(ctx, loss: float = 1.0, epochs: int = 3, wait_for: str = ""):
    model = torch.nn.Linear(2, 1)
    resumed = ctx.resume(model=model)
    first = int(resumed.epoch) + 1 if resumed else 1
    print("begins with epoch", first, flush=True)
    for epoch in range(first, epochs + 1):
        ctx.checkpoint(model=model, step=epoch, epoch=epoch, metrics={"val/loss": loss})
        if epoch == 2 and wait_for:
            print("waiting", flush=True)
            while not os.path.exists(wait_for) and not ctx.preempted:
                time.sleep(0.02)
"""

SCRIPT = """
import ddptrain, torch
ddptrain.context().checkpoint(model=torch.nn.Linear(2, 1), step=1, metrics={"val/loss": 0.5})
"""


@pytest.fixture
def project(tmp_path: Path, warm_cluster: str) -> Path:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    (tmp_path / "cluster").write_text(warm_cluster)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("1")
    return tmp_path


def write_config(folder: Path, **fields: Any) -> Path:
    retrain = {"model": "mine", **fields.pop("retrain", {})}
    cluster = {"address": (folder / "cluster").read_text(), "ranks": 1}
    config = {"workload": "mine:main", "cluster": cluster, "data": {"sources": ["data"]}, "retrain": retrain}
    path = folder / "mine.yaml"
    path.write_text(json.dumps(config | fields))  # JSON is YAML
    return path


def shown(cli: Cli, *words: str) -> Any:
    """What a command of `ddptrain models` or `results` prints as JSON."""
    done = cli(*words, "--json")
    assert done.rc == 0, done.stderr
    return json.loads(done.stdout)


def promotions(cli: Cli) -> list[int]:
    """The versions that were promoted, the earliest first."""
    history = shown(cli, "models", "show", "mine", "--history")
    return [change["version"] for change in history if change["action"] == "promoted"]


def runs(cli: Cli) -> list[dict[str, Any]]:
    """The runs of the folder."""
    found: list[dict[str, Any]] = shown(cli, "results", "list")
    return found


def retrainings(folder: Path) -> list[dict[str, Any]]:
    """The records of all retrainings, the earliest first."""
    return [json.loads(path.read_text()) for path in sorted((folder / "models/mine/retrainings").glob("*.json"))]


def last_object(done: Finished) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_promoted_then_unchanged_then_rejected(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    first = run_cli("retrain", config, "--output", "json")
    assert first.rc == 0, first.stderr
    end = last_object(first)
    assert (end["event"], end["status"], end["version"]) == ("retrain_finished", "promoted", 1)
    stages = [each["stage"] for each in end["stages"]]
    assert stages[:6] == ["lock", "check data", "train", "evaluate", "gate", "promote"]

    second = run_cli("retrain", config)
    assert second.rc == 0
    assert second.stdout.splitlines()[-1] == (
        "retrain mine unchanged: data, params and code are those of version 1, the champion"
    )

    third = run_cli("retrain", config, "--force", "--set", "params.loss=2.0")
    assert third.rc == 7
    assert third.stdout.splitlines()[-1] == (
        "retrain mine rejected: version 2 was rejected, version 1 stays the champion: "
        "val/loss 2 is worse than the champion's 1 by 1"
    )
    assert promotions(run_cli) == [1]
    assert [each["version"] for each in shown(run_cli, "models", "show", "mine")] == [1, 2]


def test_data_that_look_wrong_are_not_trained(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    for number in range(4):
        (project / "data" / f"{number}.csv").write_text("1")
    assert run_cli("retrain", config).rc == 0
    for number in range(4):
        (project / "data" / f"{number}.csv").unlink()
    done = run_cli("retrain", config)
    assert done.rc == 2
    assert done.stdout.splitlines()[-1] == (
        "retrain mine failed: the training data have shrunk from 5 to 1 files, to less than half; "
        "nothing was trained. If the data are right, add --force"
    )
    assert len(runs(run_cli)) == 1
    forced = run_cli("retrain", config, "--force")
    assert forced.rc == 0 and "training anyway" in forced.stderr


STAGES = ("check data", "train", "evaluate", "gate", "promote")


@pytest.mark.long
def test_start_after_a_kill_in_each_stage_continues(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    for stage in STAGES:
        killed = run_cli.start("retrain", config, "--output", "json")
        wait_until(partial(_is_in_stage, killed, stage))
        killed.kill_group()
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    (record,) = (each for each in retrainings(project) if each["status"] == "promoted")
    (run,) = runs(run_cli)  # trained once
    (version,) = shown(run_cli, "models", "show", "mine")  # one that was killed while it was added is not shown
    assert (record["run_id"], promotions(run_cli)) == (run["run_id"], [version["version"]])
    assert run_cli("models", "export", "mine", "out").rc == 0, "its files are whole"
    assert run_cli("retrain", config).stdout.startswith("retrain mine unchanged")


def _is_in_stage(running: Running, stage: str) -> bool:
    return f'"stage": "{stage}"' in running.stdout or running.popen.poll() is not None


def begun(run_cli: Cli, config: Path) -> Running:
    """A start whose training waits after its second checkpoint, which is in the run directory."""
    running = run_cli.start("retrain", config)
    running.wait_for("waiting")
    wait_until(lambda: list(config.parent.glob("runs/*/checkpoints/step-2/checkpoint.json")))
    return running


def log_of(project: Path, run: dict[str, Any]) -> str:
    return (project / "runs" / str(run["run_id"]) / "logs" / "rank-0.log").read_text()


def test_training_that_was_killed_is_resumed(project: Path, run_cli: Cli) -> None:
    config = write_config(project, params={"wait_for": "go"})
    begun(run_cli, config).kill_group()
    (project / "go").touch()
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    assert "continuing retraining 1 after the stage check data (it was killed)" in done.stderr
    (run,) = runs(run_cli)
    assert "begins with epoch 3" in log_of(project, run)


def test_deadline_saves_and_the_next_start_continues(project: Path, run_cli: Cli) -> None:
    config = write_config(project, params={"wait_for": "go"}, retrain={"deadline": "5s"})
    stopped = run_cli("retrain", config)
    assert stopped.rc == 8, stopped.stderr
    assert stopped.stdout.splitlines()[-1] == (
        "retrain mine deadline: the deadline of 5 s was reached; the next start continues"
    )
    (project / "go").touch()
    done = run_cli("retrain", config, "--set", "retrain.deadline=1h")
    assert done.rc == 0, done.stderr
    (run,) = runs(run_cli)
    assert log_of(project, run).count("begins with epoch 1") == 1


def test_second_start_is_skipped(project: Path, run_cli: Cli) -> None:
    config = write_config(project, params={"wait_for": "go"})
    first = begun(run_cli, config)
    second = run_cli("retrain", config, "--output", "json")
    assert second.rc == 0
    assert last_object(second)["status"] == "skipped"
    assert f"is being retrained by process {first.popen.pid} on" in last_object(second)["reason"]
    (project / "go").touch()
    assert first.finish().rc == 0
    assert promotions(run_cli) == [1] and len(runs(run_cli)) == 1


def test_dry_run_changes_nothing(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    done = run_cli("retrain", config, "--dry-run")
    assert done.rc == 0 and done.stdout == "retrain mine skipped: dry run: it would train\n"
    assert not (project / "models").exists() and not (project / "runs").exists()


@pytest.mark.long
def test_damaged_champion_is_refused_and_replaced(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    assert run_cli("retrain", config).rc == 0
    weights = next((project / "models" / "mine" / "versions" / "1").rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused = run_cli("models", "promote", "mine", "1")
    assert refused.rc == 4 and weights.name in refused.stderr
    done = run_cli("retrain", config, "--force", "--set", "params.loss=5.0")
    assert done.rc == 0, done.stderr
    assert "the champion cannot be evaluated: version 1 of model mine is damaged" in done.stderr
    assert promotions(run_cli) == [1, 2]


def test_script_is_retrained_by_the_metrics_of_its_checkpoints(project: Path, run_cli: Cli) -> None:
    (project / "train.py").write_text(SCRIPT)
    config = write_config(project, workload={"script": "train.py"})
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    (version,) = shown(run_cli, "models", "show", "mine")
    assert version["metrics"] == {"val/loss": 0.5}


@pytest.mark.long
def test_models_and_runs_in_a_store(project: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "store").mkdir()
    with seaweed(project / "store", "bucket") as environment:
        for name, value in {**environment, "XDG_CACHE_HOME": str(project / "cache")}.items():
            monkeypatch.setenv(name, value)
        places = {"models": {"dir": "s3://bucket/models"}, "results": {"dir": "s3://bucket/runs"}}
        config = write_config(project, params={"wait_for": "go"}, **places)
        first = run_cli.start("retrain", config)
        first.wait_for("waiting")
        assert "skipped: model mine is being retrained by process" in run_cli("retrain", config).stdout
        first.kill_group()
        (project / "go").touch()
        done = run_cli("retrain", config)
        assert done.rc == 0, done.stderr
        versions = shown(run_cli, "models", "show", "mine", "--models-dir", "s3://bucket/models")
        assert [(each["version"], each["aliases"]) for each in versions] == [(1, ["champion"])]
        assert run_cli("retrain", config).stdout.startswith("retrain mine unchanged")
