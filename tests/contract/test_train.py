"""What `ddptrain train` promises whatever it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.conftest import Project, events, lines


def test_function_is_trained_by_every_rank(project: Project, shared_cluster: str) -> None:
    config = project.function(
        "def train(ctx):\n    ctx.log({'loss': 1.0 + ctx.rank}, step=1)\n    print('of', ctx.rank)\n"
    )
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--output", "json", rc=0)
    told = events(done.stdout)
    assert {(each["rank"], each["line"]) for each in told if each["event"] == "log"} == {(0, "of 0"), (1, "of 1")}
    assert sorted(each["rank"] for each in told if each["event"] == "rank_started") == [0, 1]
    last, record = told[-1], project.record()
    assert (last["event"], last["status"], last["exit_code"], last["failure"]) == ("run_finished", "succeeded", 0, None)
    assert last["run_dir"] == str(project.run_directories()[0]) and last["duration_s"] > 0
    for name in ("run_id", "result", "best", "last_metrics"):
        assert last[name] == record[name]
    assert record["world_size"] == 2


def test_saved_checkpoints_and_files_are_events_with_plain_names_on_stdout_and_in_the_run_directory(
    project: Project, shared_cluster: str
) -> None:
    code = """
        import torch

        def train(ctx):
            ctx.log_table("worst", ["name"], [["rex"]])
            ctx.checkpoint(model=torch.nn.Linear(1, 1), step=3, metrics={"loss": 1.0})
    """
    config = project.function(code, checkpoint={"metric": "no/such"})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "1", "--output", "json", rc=0)
    (run,) = project.run_directories()
    for told in (events(done.stdout), lines(run / "events.jsonl")):
        saved = [(event["step"], event["path"]) for event in told if event["event"] == "checkpoint_saved"]
        assert saved == [(3, str(run / "checkpoints" / "step-3"))]
        files = [event["path"] for event in told if event["event"] == "artifact_saved"]
        assert files == [str(run / "artifacts/tables/worst/rank-0.csv")]
        warnings = [event["message"] for event in told if event["event"] == "notice" and event["level"] == "warning"]
        assert any("no/such" in warning for warning in warnings)
        assert not {"brought_home", "checkpoint_adopted", "warning"} & {event["event"] for event in told}


@pytest.mark.long
def test_run_directory_of_an_earlier_version_is_shown(project: Project, shared_cluster: str) -> None:
    config = project.function("def train(ctx):\n    ctx.log({'loss': 0.5}, step=1)\n")
    project("train", config, "--cluster", shared_cluster, "--ranks", "1", rc=0)
    (run,) = project.run_directories()
    old = [
        {"event": "brought_home", "time_s": 1.0, "rank": 0, "what": "checkpoint step-1", "path": "checkpoints/step-1"},
        {"event": "checkpoint_adopted", "time_s": 1.0, "rank": 0, "step": 1, "folder": "step-1"},
        {"event": "warning", "time_s": 1.0, "message": "slow"},
    ]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in old)
    assert project.record()["status"] == "succeeded"
    project("results", "show", "latest", rc=0)
    project("results", "report", "latest", rc=0)


def test_copy_of_the_image_training_is_a_workload(project: Project) -> None:
    source = Path(__file__).parents[2] / "ddptrain" / "workloads" / "images" / "train.py"
    project.write("mine.py", source.read_text())
    small = {"architecture": "small_cnn", "image_size": 16, "epochs": 1, "loader_workers": 0, "subset": 2}
    config = {"workload": "mine:train", "cluster": {"ranks": 2}, "params": small}
    project.write("mine.yaml", json.dumps(config))
    done = project("train", "mine.yaml", rc=0)
    assert "200 images of 2 classes in builtin: 160 to train on, 40 to validate with" in done.stdout
    assert 0 <= project.record()["last_metrics"]["val/accuracy"] <= 1
