"""`ddptrain results sync` of runs with several attempts, of killed ones, and of those in a store: each row once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.contract.conftest import Project
from tests.servers.seaweed import bucket_of, seaweed
from tests.servers.wandb_backend import Backend, wandb_backend
from tests.servers.wandb_training import OfflineRun
from tests.support.command import PATIENCE_S

TRAIN = """
import os, time

def train(ctx, kill=False, pause_s=0.0):
    first = 0 if ctx.attempt == 1 else 3
    for step in range(first, first + 5):
        ctx.log({"loss": 1 / (step + 1)}, step=step)
    if kill and ctx.attempt == 1:
        while not os.path.exists("may-die"):
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
    print("logged", flush=True)
    time.sleep(pause_s)
"""
ONCE = [0, 1, 2, 3, 4]


@pytest.fixture
def backend() -> Iterator[Backend]:
    with wandb_backend() as made:
        yield made


def config(project: Project, mode: str = "rank0", **params: object) -> str:
    wandb = {"mode": mode, "log_every": 1}
    failure = {"max_restarts": 1}
    return project.function(TRAIN, params=params, failure=failure, tracking={"wandb": wandb})


def offline(project: Project) -> dict[str, str]:
    return {"WANDB_API_KEY": "", "WANDB_MODE": "offline", "HOME": str(project.folder)}


def rows(history: list[dict[str, object]], prefix: str = "") -> list[object]:
    return [row[f"{prefix}step"] for row in history if f"{prefix}loss" in row]


def test_attempts_in_a_store_are_sent_from_there_in_order_and_only_once(
    project: Project, shared_cluster: str, backend: Backend
) -> None:
    name = config(project, kill=True)
    running = project.start("train", name, "--cluster", shared_cluster, "--ranks", "1", env=offline(project))
    run = when_on_disk(project, 1)
    (project.folder / "may-die").touch()
    assert running.finish().rc == 0
    for folder in ("seaweed", "tmp"):
        (project.folder / folder).mkdir()
    with seaweed(project.folder / "seaweed", "bucket") as store:
        bucket = bucket_of(store, "bucket")
        for path in (path for path in run.rglob("*") if path.is_file()):
            bucket.put(f"runs/{path.relative_to(run.parent).as_posix()}", path)
        env = {**store, **backend.environment, "TMPDIR": str(project.folder / "tmp")}
        env["XDG_CACHE_HOME"] = str(project.folder / "cache")
        done = project("results", "sync", "--all", "--runs-dir", "s3://bucket/runs", env=env, rc=0)
        assert done.stdout == f"{run.name}: 2 sent to W&B\n"
        assert rows(backend.run.history) == [*ONCE, 3, 4, 5, 6, 7]
        assert (backend.run.state, backend.run.exits[-1]) == ("finished", 0)
        asked = len(backend.asked)
        done = project("results", "sync", f"s3://bucket/runs/{run.name}", env=env, rc=0)
        assert (done.stdout, len(backend.asked)) == (f"{run.name}: nothing to send to W&B\n", asked)
        shown = project("results", "show", "latest", "--runs-dir", "s3://bucket/runs", env=env, rc=0).stdout
        assert f"/runs/{backend.run.id}" in shown
    assert not [*(project.folder / "tmp").iterdir()]


def when_on_disk(project: Project, ranks: int) -> Path:
    """The run directory, once the log of each rank's W&B run has all rows of the first attempt."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        logs = list(project.folder.glob("runs/*/tracking/wandb/**/run-*.wandb"))
        if len(logs) == ranks and all(len(OfflineRun(log).history) >= len(ONCE) for log in logs):
            return project.run_directories()[0]
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)


def killed_with_its_host(project: Project, name: str, ranks: int, env: Mapping[str, str]) -> Path:
    """The directory of a run of which every process is killed once its rows are on disk."""
    running = project.start("train", name, "--ranks", str(ranks), env={"HOME": str(project.folder), **env})
    run = when_on_disk(project, ranks)
    family = [*psutil.Process(running.popen.pid).children(recursive=True), psutil.Process(running.popen.pid)]
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it has ended with another one
            process.kill()
    running.popen.wait(30)
    psutil.wait_procs(family, timeout=30)
    return run


@pytest.mark.long
def test_online_run_that_was_killed_with_its_host_is_sent_later_and_each_row_is_there_once(
    project: Project, backend: Backend
) -> None:
    run = killed_with_its_host(project, config(project, pause_s=600), 1, backend.environment)
    project("results", "sync", run, env=backend.environment, rc=0)
    assert rows(backend.run.history) == ONCE


@pytest.mark.long
def test_ranks_that_shared_a_run_are_sent_later_as_a_run_each(project: Project, backend: Backend) -> None:
    """Their rows have the same steps, by which the server would take them for one."""
    run = killed_with_its_host(project, config(project, mode="shared", pause_s=600), 2, backend.environment)
    for _ in range(2):  # the second time nothing is left to be sent
        project("results", "sync", run, env=backend.environment, rc=0)
        sent = {key.partition("-")[2]: run for key, run in backend.runs.items() if "-rank_" in key}
        assert set(sent) == {"rank_0", "rank_1"}
        assert [rows(sent[f"rank_{rank}"].history, f"rank_{rank}/") for rank in range(2)] == [ONCE, ONCE]


def test_running_run_is_left_alone_and_without_a_key_nothing_is_tried(
    project: Project, shared_cluster: str, backend: Backend
) -> None:
    name = config(project, pause_s=600)
    running = project.start(
        "train", name, "--cluster", shared_cluster, "--ranks", "1", "--run-id", "r", env=offline(project)
    )
    when_on_disk(project, 1)
    done = project("results", "sync", "r", env=backend.environment)
    assert "it is running" in done.stdout + done.stderr
    running.popen.terminate()
    running.finish()
    done = project("results", "sync", "r", env={"WANDB_API_KEY": "", "HOME": str(project.folder)}, rc=2)
    assert "no API key" in done.stderr
    assert backend.asked == []
    assert "--all" in project("results", "sync", rc=2).stderr
