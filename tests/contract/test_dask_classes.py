"""Clusters of Dask cluster classes: of any class for one run, and of classes for clouds with `cluster up`."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Project
from tests.support.command import wait_until

CLASSES = """
import os, time
from pathlib import Path
from distributed import LocalCluster


class Quiet(LocalCluster):
    def __init__(self, **kwargs):
        super().__init__(dashboard_address="127.0.0.1:0", **{"n_workers": 1, "threads_per_worker": 1, **kwargs})
        print("noise of the class", flush=True)


class Slow(Quiet):
    def __init__(self):
        Path("begun").touch()
        while not Path("go").exists():
            time.sleep(0.02)
        super().__init__()

    def close(self, timeout=None):
        super().close(timeout)
        Path("closed").touch()


class Crashing(Quiet):
    def __init__(self):
        print("libcloud: out of memory", flush=True)
        os._exit(3)
"""
# A cluster that lives without its object, as Coiled's do: the name finds it.
COILED = """
import subprocess, sys, time
from pathlib import Path
from distributed import Client

class Cluster:
    def __init__(self, name, n_workers=1, shutdown_on_close=True):
        self.name, self.shutdown_on_close = name, shutdown_on_close
        self.file = Path(f"{name}.json")
        if not self.file.exists():
            where = ["--scheduler-file", str(self.file), "--host", "127.0.0.1", "--no-dashboard"]
            commands = [["scheduler", *where, "--port", "0", "--dashboard-address", "127.0.0.1:0"]]
            commands += [["worker", *where, "--no-nanny", "--nthreads", "1"] for _ in range(n_workers)]
            for command in commands:
                subprocess.Popen([sys.executable, "-m", f"distributed.cli.dask_{command[0]}", *command[1:]],
                                 start_new_session=True)
        while not (self.file.exists() and self.file.read_text().strip().endswith("}")):
            time.sleep(0.05)
        self.scheduler_address = __import__("json").loads(self.file.read_text())["address"]

    def close(self, force_shutdown=False):
        if force_shutdown or self.shutdown_on_close:
            Client(self.scheduler_address).shutdown()
            self.file.unlink(missing_ok=True)
"""


def configured(project: Project, code: str = "pass", **cluster: Any) -> str:
    project.write("classes.py", CLASSES)
    return project.function(f"def train(ctx):\n    {code}\n", cluster=cluster)


def listed(project: Project) -> list[Any]:
    found: list[Any] = json.loads(project("cluster", "status", "--json", rc=0).stdout)
    return found


def processes_of(project: Project) -> list[str]:
    """Processes whose working directory is the project's."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").readlink() == project.folder and (path / "cmdline").read_bytes():
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_class_is_used_for_a_run_without_its_noise_and_closed_after_it(project: Project) -> None:
    code = "print('rank', ctx.rank, 'of', ctx.world_size)"
    config = configured(project, code, **{"class": "classes.Quiet", "kwargs": {"n_workers": 2}})
    done = project("train", config, "--output", "json", rc=0)
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed[-1]["event"] == "run_finished" and "rank 1 of 2" in done.stdout
    assert "noise" not in done.stdout + done.stderr
    assert processes_of(project) == [] and listed(project) == []


@pytest.mark.long
def test_class_is_scaled_to_the_ranks_if_its_arguments_have_no_number(project: Project) -> None:
    code = "print('rank', ctx.rank, 'of', ctx.world_size)"
    config = configured(project, code, **{"class": "classes.Quiet", "kwargs": {"processes": True}})
    done = project("train", config, "--ranks", "2", rc=0)
    assert "rank 1 of 2" in done.stdout


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_class_whose_run_ends_while_it_is_created_is_closed_all_the_same(project: Project, sent: int) -> None:
    config = configured(project, "pass", **{"class": "classes.Slow"})
    running = project.start("train", config)
    deadline = time.monotonic() + 60
    while not (project.folder / "begun").exists():
        assert time.monotonic() < deadline and running.popen.poll() is None
        time.sleep(0.02)
    running.popen.send_signal(sent)
    time.sleep(0.2)
    (project.folder / "go").touch()
    running.finish(60)
    while not (project.folder / "closed").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("cls", "kwargs", "rc", "words"),
    [
        pytest.param("classes.Quik", {}, 2, "has no Quik", marks=pytest.mark.long),
        pytest.param(
            "dask_clouds.FargateCluster", {}, 2, "pip install dask-clouds, if that is", marks=pytest.mark.long
        ),
        ("classes.Quiet", {"n_worker": 2}, 2, "unexpected keyword argument 'n_worker'"),
        pytest.param("classes.Quiet", {"processes": False}, 4, "no other process can reach it", marks=pytest.mark.long),
        ("classes.Crashing", {}, 4, "libcloud: out of memory"),
    ],
)
def test_class_that_can_not_be_created_is_named_with_the_reason(
    project: Project, cls: str, kwargs: dict[str, Any], rc: int, words: str
) -> None:
    done = project("train", configured(project, "pass", **{"class": cls, "kwargs": kwargs}), rc=rc)
    assert words in done.stderr and "Traceback" not in done.stderr.partition("last lines of its log")[0]


@pytest.mark.long
def test_class_whose_cluster_ends_with_its_process_is_not_started_by_cluster_up(project: Project) -> None:
    done = project("cluster", "up", configured(project, "pass", **{"class": "classes.Quiet"}), rc=2)
    assert "give its class to a run" in done.stderr and listed(project) == []


@pytest.mark.long
def test_class_of_a_cloud_lives_from_up_to_down(project: Project) -> None:
    project.write("coiled.py", COILED)
    config = configured(project, "print('rank', ctx.rank)", **{"class": "coiled.Cluster", "name": "lab"})
    view = json.loads(project("cluster", "up", config, "--json", rc=0).stdout)
    assert (view["state"], view["slots"], view["parts"][0]["id"]) == ("up", 1, "coiled.Cluster")
    assert "rank 0" in project("train", config, rc=0).stdout
    project("cluster", "down", "lab", rc=0)
    wait_until(lambda: not processes_of(project))
    assert listed(project) == [] and not list(project.folder.glob("ddptrain-lab.json"))
