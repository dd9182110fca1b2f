"""What happens when a metric, or the saved model, is no longer finite: `failure.nan`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.contract.conftest import Project, events, lines

# From step `bad` on the loss is NaN. Rank 1 logs it; with `save` it, or with `broken` the NaN weights, are saved.
CODE = """
    import torch

    def train(ctx, bad=3, steps=6, save=False, broken=False, end=0):
        torch.manual_seed(0)
        model = ctx.prepare(torch.nn.Linear(1, 1))
        resumed = ctx.resume(model=model)
        for step in range((resumed.step if resumed else 0) + 1, steps + 1):
            loss = float("nan") if step >= bad else 1.0 / step
            if broken and step >= bad:
                for parameter in model.parameters():
                    torch.nn.init.constant_(parameter, float("nan"))
            if ctx.rank == 1 and not save:
                ctx.log({"train/loss": loss}, step=step)
            if save:
                ctx.checkpoint(model=model, step=step, metrics={} if broken else {"loss": loss})
        if end:
            torch.distributed.barrier()  # the checkpoint of the last step is written
            raise SystemExit(end)
"""
EVERY_STEP = {"every_epochs": None, "every_steps": 1, "keep": 2, "metric": "loss"}


def train(project: Project, cluster: str, *args: str, rc: int, **config: Any) -> Any:
    name = project.function(CODE, **{"checkpoint": EVERY_STEP, **config})
    return project("train", name, "--cluster", cluster, "--ranks", "2", "--output", "json", *args, rc=rc)


def not_finite(project: Project) -> list[dict[str, Any]]:
    (run,) = project.run_directories()
    return [each for each in lines(run / "events.jsonl") if each["event"] == "not_finite"]


def test_first_value_that_is_not_finite_is_named_once(project: Project, shared_cluster: str) -> None:
    done = train(project, shared_cluster, rc=0)
    warnings = [each for each in events(done.stdout) if each["event"] == "not_finite"]
    assert [(each["metric"], each["step"], each["rank"], each["value"]) for each in warnings] == [
        ("train/loss", 3, 1, "nan")
    ]
    assert len(not_finite(project)) == 1
    assert project.record()["not_finite"]["step"] == 3
    shown = project("results", "show", "latest", rc=0).stdout
    assert re.search("rank 1 +train/loss is nan at step 3", shown)
    page = project.folder / "page.html"
    project("results", "report", "latest", "--output", page, rc=0)
    assert "train/loss is nan at step 3" in page.read_text(encoding="utf-8")


def test_warning_is_shown_while_the_run_goes_on(project: Project, shared_cluster: str) -> None:
    name = project.function(CODE, checkpoint=EVERY_STEP)
    done = project("train", name, "--cluster", shared_cluster, "--ranks", "2", "--output", "plain", rc=0)
    assert done.stderr.count("rank 1: train/loss is nan at step 3") == 1
    assert "nan     rank 1: train/loss is nan at step 3" in done.stdout, "in the summary"


def test_stop_ends_the_run_as_a_failure_of_the_training_code(project: Project, shared_cluster: str) -> None:
    done = train(project, shared_cluster, rc=1, failure={"nan": "stop"}, params={"steps": 100000})
    last = events(done.stdout)[-1]
    assert (last["status"], last["failure"]["rank"]) == ("failed", 1)
    assert "train/loss is nan at step 3" in last["failure"]["message"]


def test_stop_ends_a_run_whose_last_value_is_not_finite(project: Project, shared_cluster: str) -> None:
    train(project, shared_cluster, rc=1, failure={"nan": "stop"}, params={"bad": 6, "steps": 6})


def test_ignore_says_nothing(project: Project, shared_cluster: str) -> None:
    train(project, shared_cluster, rc=0, failure={"nan": "ignore"})
    assert not_finite(project) == []
    assert project.record()["not_finite"] is None


def test_built_in_workloads_stop_unless_told_otherwise(project: Project) -> None:
    project.write("names.yaml", "workload: petnames")
    assert "nan: stop" in project("train", "names.yaml", "--dry-run", rc=0).stdout
    assert "nan: ignore" in project("train", "names.yaml", "--dry-run", "--set", "failure.nan=ignore", rc=0).stdout


@pytest.mark.parametrize(
    ("broken", "strategy"),
    [
        (False, "ddp"),
        pytest.param(True, "ddp", marks=pytest.mark.long),
        pytest.param(True, "fsdp", marks=pytest.mark.long),
    ],
    ids=["metrics", "weights", "sharded weights"],
)
def test_last_finite_checkpoint_is_kept_and_resumed(
    project: Project, shared_cluster: str, broken: bool, strategy: str
) -> None:
    prepare = {"strategy": strategy}
    params = {"save": True, "broken": broken, "end": 1}
    checkpoint = {**EVERY_STEP, "asynchronous": False}
    train(project, shared_cluster, rc=1, params=params, prepare=prepare, checkpoint=checkpoint)
    (run,) = project.run_directories()
    assert [path.name for path in sorted(run.glob("checkpoints/step-*"))] == ["step-2", "step-5", "step-6"]
    if not broken:
        assert project.record()["best"]["step"] == 2
    params = {"save": True, "bad": 99}
    train(project, shared_cluster, "--resume", "latest", "--allow-changes", rc=0, params=params, prepare=prepare)
    record = project.record()
    assert record["attempts"][-1]["resumed_from"] == 2
    assert record["not_finite"] is None  # these values belong to steps that were repeated
    assert "step-2" not in record["checkpoints"]
