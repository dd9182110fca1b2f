"""`ddptrain sweep` as a user starts it: it is a run directory that other commands list, stop and continue."""

from __future__ import annotations

import json

from tests.contract.conftest import Project

FUNCTION = """
import torch

def train(ctx, lr: int = 1, steps: int = 4, wait_for: str = ""):
    import os, time
    model = torch.nn.Linear(1, 1)
    resumed = ctx.resume(model=model)
    for step in range((resumed.step if resumed else 0) + 1, steps + 1):
        ctx.checkpoint(model=model, step=step, metrics={"loss": (lr - 3) ** 2 + 1 / step}, last=step == steps)
        if step == 1:
            print("waiting", flush=True)
            while wait_for and not os.path.exists(wait_for) and not ctx.preempted:
                time.sleep(0.02)
"""


def test_sweep_is_stopped_and_continued_like_a_run(project: Project, shared_cluster: str) -> None:
    sweep = {"space": {"params.lr": [5, 3]}, "search": "grid", "metric": "loss", "parallel": 1}
    config = project.function(
        FUNCTION, cluster={"address": shared_cluster, "ranks": 1}, params={"wait_for": "go"}, sweep=sweep
    )
    running = project.start("sweep", config, "--sweep-id", "s", "--output", "json")
    running.wait_for("trial_started")
    assert project("sweep", config, "--sweep-id", "s", "--resume").rc == 6
    stopped = json.loads(project("stop", "s", "--json", rc=0).stdout)
    assert (stopped["run_id"], stopped["status"], stopped["exit_code"]) == ("s", "preempted", 75)
    assert running.finish().rc == 75
    (listed,) = json.loads(project("results", "list", "--sweeps", "--json", rc=0).stdout)
    assert (listed["sweep_id"], listed["status"], listed["ended"]) == ("s", "preempted", 0)
    assert json.loads(project("results", "list", "--json", rc=0).stdout) == []  # runs: the trials are below it

    project.write("go", "")
    project("sweep", "--resume", rc=0)
    shown = json.loads(project("results", "show", "s", "--json", rc=0).stdout)
    assert [(each["params"]["params.lr"], each["value"]) for each in shown["trials"]] == [(5, 4.25), (3, 0.25)]
    assert json.loads((project.folder / "runs/s/run.json").read_text())["kind"] == "sweep"
    assert project("results", "show", "s/1", rc=0).stdout
    assert "is not running" in project("stop", "s", rc=0).stdout
