"""What programs read: the JSON of list, show, logs and of the events is as docs/reference/output.schema.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.contract.conftest import Project, events

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/reference/output.schema.json").read_text())
WORK = """
    import torch


    def train(ctx, fails=False, nan=False):
        model = torch.nn.Linear(2, 1)
        resumed = ctx.resume(model=model)
        for epoch in ctx.epochs(2):
            ctx.progress(epoch, 2)
            ctx.log({"loss": float("nan") if nan else 1.0 / epoch}, step=epoch, epoch=epoch)
            ctx.checkpoint(model=model, step=epoch, metrics={"val/loss": 1.0 / epoch})
            if fails and resumed is None:
                raise ValueError("fails once")
        ctx.save_file("a.txt", b"x")
        print("done", flush=True)
        return {"score": 1}
"""


def check(value: Any, name: str) -> None:
    jsonschema.Draft202012Validator({**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{name}"}]}).validate(value)


def check_outputs(project: Project, stdout: str) -> set[str]:
    """Check the events of the newest run, and what the other commands print of it; return the kinds of the events."""
    for event in events(stdout):
        check(event, "event")
    listed = json.loads(project("results", "list", "--json", rc=0).stdout)
    for run in listed:
        check(run, "listed_run")
    check(project.record(), "shown_run")
    logs = events(project("results", "logs", "latest", "--json", rc=0).stdout)
    for line in logs:
        check(line, "event")
    assert {"event": "log", "rank": 0, "line": "done"} in logs
    return {event["event"] for event in events(stdout)}


def test_run_that_failed_and_was_started_again(project: Project, shared_cluster: str) -> None:
    config = project.function(
        WORK, params={"fails": True}, failure={"max_restarts": 1}, checkpoint={"metric": "val/loss"}
    )
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--output", "json", rc=0)
    kinds = check_outputs(project, done.stdout)
    expected = {"run_started", "rank_started", "entered", "log", "metrics", "checkpoint_saved", "artifact_saved"}
    assert kinds >= {
        *expected,
        "failure",
        "fault",
        "rank_ended",
        "attempt_ended",
        "finished",
        "returned",
        "run_finished",
    }


def test_run_whose_loss_is_not_a_number(project: Project, shared_cluster: str) -> None:
    config = project.function(WORK, params={"nan": True}, checkpoint={"metric": "val/loss"})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "1", "--output", "json", rc=0)
    assert "not_finite" in check_outputs(project, done.stdout)


def test_sweep_and_wrong_configuration(project: Project, shared_cluster: str) -> None:
    sweep = {"space": {"params.nan": [False]}, "search": "grid", "metric": "val/loss", "ranks": 1}
    config = project.function(WORK, sweep=sweep, checkpoint={"metric": "val/loss"})
    project("sweep", config, "--cluster", shared_cluster, "--sweep-id", "searched", rc=0)
    check(project.record("searched"), "shown_sweep")
    wrong = project("train", config, "--set", "nothing=1", "--output", "json", rc=2)
    for event in events(wrong.stdout):
        check(event, "event")
    assert [event["event"] for event in events(wrong.stdout)] == ["error"]


def test_schema_refuses_what_it_does_not_describe() -> None:
    for value, name in (({"event": "log", "rank": "0", "line": ""}, "event"), ({"run_id": "x"}, "listed_run")):
        with pytest.raises(jsonschema.ValidationError):
            check(value, name)
