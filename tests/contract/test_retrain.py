"""`ddptrain retrain` as cron starts it: when it trains, when not, and what it leaves in the registry."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.contract.conftest import Project, events
from tests.support.command import wait_until

FUNCTION = """
import os, time
import torch

def train(ctx, loss: float = 1.0, wait_for: str = ""):
    ctx.checkpoint(model=torch.nn.Linear(2, 1), step=1, metrics={"val/loss": loss})
    print("waiting", flush=True)
    while wait_for and not os.path.exists(wait_for) and not ctx.preempted:
        time.sleep(0.02)
"""


def nightly(project: Project, cluster: str, **sections: Any) -> str:
    """Write a function and a configuration that retrains it as the model `mine`."""
    settings = {"model": "mine", **sections.pop("retrain", {})}
    return project.function(FUNCTION, cluster={"address": cluster, "ranks": 1}, retrain=settings, **sections)


def last(stdout: str) -> dict[str, Any]:
    return events(stdout)[-1]


@pytest.mark.long
def test_function_whose_data_are_not_named_is_trained_each_night(project: Project, shared_cluster: str) -> None:
    config = nightly(project, shared_cluster)
    project("retrain", config, rc=0)
    second = project("retrain", config, "--output", "json", rc=0)
    assert (last(second.stdout)["status"], last(second.stdout)["version"]) == ("promoted", 2)
    assert len(project.run_directories()) == 2


def test_skip_without_named_data_is_an_error_that_names_both_ways_out(project: Project, shared_cluster: str) -> None:
    config = nightly(project, shared_cluster, retrain={"if_unchanged": "skip"})
    refused = project("retrain", config, rc=2)
    for text in ("retrain.if_unchanged", "data.sources", "train"):
        assert text in refused.stderr, refused.stderr
    assert not project.run_directories()


def test_named_data_that_have_not_changed_are_not_trained_again(project: Project, shared_cluster: str) -> None:
    project.write("data/a.csv", "1")
    config = nightly(project, shared_cluster, data={"sources": ["data"]})
    project("retrain", config, rc=0)
    second = project("retrain", config, rc=0)
    assert "mine unchanged: data, params and code are those of version 1, the champion" in second.stdout
    slots = ["2026-01-02T03:00:00Z", "2026-01-03T03:00:00Z"]
    for slot in slots:  # nights without changes are one record
        project("retrain", config, "--slot", slot, rc=0)
    again = last(project("retrain", config, "--slot", slots[1], "--output", "json", rc=0).stdout)
    assert again["status"] == "skipped" and f"the scheduled time {slots[1]} is done: retraining 2" in again["reason"]
    project.write("data/b.csv", "2")
    third = project("retrain", config, "--output", "json", rc=0)
    assert (last(third.stdout)["status"], last(third.stdout)["version"]) == ("promoted", 2)


def test_each_start_that_replaces_gets_the_model(project: Project, shared_cluster: str) -> None:
    """Two starts wait for the owner: the one that gets the model second has to stop the run of the first one."""
    config = nightly(project, shared_cluster, params={"wait_for": "go"}, retrain={"overlap": "replace", "wait": "90s"})
    owner = project.start("retrain", config)
    owner.wait_for("waiting")
    waiting = [project.start("retrain", config) for _ in range(2)]
    assert owner.finish().rc == 75
    wait_until(lambda: any(start.popen.poll() is not None for start in waiting))
    first, second = sorted(waiting, key=lambda start: start.popen.poll() is None)
    ended = first.finish()
    assert ended.rc == 75, ended.stderr
    assert "retrain mine interrupted: " in ended.stdout
    project.write("go", "")
    assert second.finish().rc == 0


def test_version_that_a_killed_start_has_promoted_is_the_end_of_its_retraining(
    project: Project, shared_cluster: str
) -> None:
    """The record is as a kill leaves it that comes after the promotion, and before the record says so."""
    config = nightly(project, shared_cluster)
    project("retrain", config, rc=0)
    path = project.folder / "models" / "mine" / "retrainings" / "000001.json"
    record = json.loads(path.read_text())
    unfinished = {"status": "running", "stage": "gate", "version": None, "ended_at": None, "exit_code": None}
    path.write_text(json.dumps({**record, **unfinished}))
    done = project("retrain", config, rc=0)
    assert "mine promoted: version 1 is the champion" in done.stdout
    assert "evaluating again" not in done.stderr
    history = json.loads(project("models", "show", "mine", "--history", "--json", rc=0).stdout)
    assert [change["version"] for change in history if change["action"] == "promoted"] == [1]
    assert len(project.run_directories()) == 1


def test_prune_spares_the_run_of_a_model_that_has_no_version_yet(project: Project, shared_cluster: str) -> None:
    config = nightly(project, shared_cluster, params={"wait_for": "go"})
    start = project.start("retrain", config)
    start.wait_for("waiting")
    start.popen.send_signal(signal.SIGTERM)
    assert start.finish().rc == 75
    (run,) = project.run_directories()
    pruned = project("results", "prune", "--keep", "0", "--failed-keep", "0", "--json", rc=0)
    assert project.run_directories() == [run], pruned.stdout
    project.write("go", "")
    project("retrain", config, rc=0)
    assert project.run_directories() == [run]
