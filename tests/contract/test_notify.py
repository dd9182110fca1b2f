"""Messages to notify.urls: what each command sends, by a web server that keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.contract.conftest import Project
from tests.servers.notify_servers import WebServer, serving

HANGS_ONCE = """
    import os, time
    import torch.distributed as dist

    def train(ctx):
        for step in range(20):
            ctx.log({"loss": 1.0}, step=step)
            if step == 10 and not os.path.exists("hung"):
                dist.barrier()
                if ctx.rank == 1:
                    open("hung", "w").close()
                    time.sleep(90)
            dist.barrier()
"""
TRIAL = """
    import torch

    def train(ctx, lr: int = 1):
        ctx.alert(f"lr is {lr}")
        ctx.checkpoint(model=torch.nn.Linear(1, 1), step=1, metrics={"loss": float(lr)}, last=True)
"""
NIGHTLY = """
    import torch

    def train(ctx, works: bool = True):
        if not works:
            raise ValueError("no names")
        ctx.checkpoint(model=torch.nn.Linear(1, 1), step=1, metrics={"loss": 1.0}, last=True)
"""


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving(server := WebServer()):
        yield server


def titles(web: WebServer) -> list[str]:
    """The titles of the messages, without the name of the configuration."""
    return [json.loads(request.body)["title"].removeprefix("work: ") for request in web.requests]


def notify(web: WebServer, *on: str) -> dict[str, object]:
    return {"urls": f"json://{web.address}/", "on": on}


def test_run_that_hangs_and_works_again_says_so_at_once_and_at_its_end(
    project: Project, shared_cluster: str, web: WebServer
) -> None:
    failure = {"hang_timeout_s": 2, "max_restarts": 1, "grace_s": 5}
    config = project.function(HANGS_ONCE, failure=failure, notify=notify(web, "hang", "recovered", "finished"))
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert titles(web) == ["1 suspected hang", "1 recovery", "run succeeded"]
    assert "after a failure the run trains again, from the beginning" in web.requests[1].body


def test_sweep_sends_the_alerts_of_its_trials_and_its_end(
    project: Project, shared_cluster: str, web: WebServer
) -> None:
    sweep = {"space": {"params.lr": [3]}, "search": "grid", "metric": "loss"}
    cluster = {"address": shared_cluster, "ranks": 1}
    config = project.function(TRIAL, cluster=cluster, sweep=sweep, notify=notify(web, "finished"))
    project("sweep", config, rc=0)
    assert titles(web) == ["1 alert", "sweep succeeded"]
    assert "lr is 3" in web.requests[0].body


def test_many_alerts_are_few_messages_that_count_the_rest(
    project: Project, shared_cluster: str, web: WebServer
) -> None:
    code = """
        def train(ctx):
            for number in range(100):
                ctx.alert(f"alert {number}")
    """
    config = project.function(code, cluster={"address": shared_cluster, "ranks": 1}, notify=notify(web))
    project("train", config, rc=0)
    bodies = [request.body for request in web.requests]
    assert len(bodies) <= 4
    sent = [len(re.findall(r"rank 0: `alert \d+`", body)) for body in bodies]
    assert max(sent) <= 20
    left_out = sum(
        int(number) for body in bodies for number in re.findall(r"and (\d+) more, which are in the log", body)
    )
    assert sum(sent) + left_out == 100


@pytest.mark.long
def test_retraining_tells_of_a_failure_once_and_when_it_works_again(
    project: Project, shared_cluster: str, web: WebServer
) -> None:
    sections = {"retrain": {"model": "work", "gate": {"metric": "loss"}}, "notify": notify(web, "failed", "recovered")}
    config = project.function(NIGHTLY, cluster={"address": shared_cluster, "ranks": 1}, **sections)
    for _ in range(2):
        project("retrain", config, "--set", "params.works=false", rc=1)
    project("retrain", config, rc=0)
    project("retrain", config, rc=0)
    failed, recovered = titles(web)
    assert failed.startswith("retraining failed: ") and "ValueError: no names" in failed
    assert recovered == "works again, version 1 is the champion"
