"""Clusters of `distributed.deploy.Cluster` classes, held by a keeper: real ones on loopback."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli, Finished, Running
from tests.integration.test_cluster import SOON_S, Clusters, is_gone, wait_until

CLASSES = """
import os, time
from pathlib import Path
from distributed import LocalCluster


class Quiet(LocalCluster):
    def __init__(self, **kwargs):
        super().__init__(dashboard_address="127.0.0.1:0", **{"n_workers": 1, "threads_per_worker": 1, **kwargs})


class Slow(Quiet):
    def __init__(self, until):
        Path(until).with_name("begun").touch()
        while not Path(until).exists():
            time.sleep(0.02)
        super().__init__()
        self._told = Path(until).with_name("told")
        self._told.write_text("built")

    def close(self, timeout=None):
        super().close(timeout)
        self._told.write_text(self._told.read_text() + ", closed")


class Crashing(Quiet):
    def __init__(self):
        print("libcloud: out of memory", flush=True)
        os._exit(3)


class Clinging(Quiet):
    def close(self, timeout=None):
        super().close(timeout)
        raise RuntimeError("AccessDenied: ecs:DeleteCluster")


class Fleeting(Quiet):
    def __init__(self, until):
        super().__init__()
        self._until = Path(until)

    @property
    def status(self):
        return "closed" if hasattr(self, "_until") and self._until.exists() else self.__dict__["status"]

    @status.setter
    def status(self, value):
        self.__dict__["status"] = value
"""


class DeployClusters(Clusters):
    """Clusters of the classes above."""

    def __init__(self, cli: Cli) -> None:
        super().__init__(cli)
        (cli.folder / "classes.py").write_text(CLASSES)

    def start_up(self, cls: str, *args: str, **kwargs: object) -> Running:
        """`ddptrain cluster up` with a class in the working directory."""
        options = ["--set", f"cluster.class={cls}", "--set", f"cluster.kwargs={json.dumps(kwargs)}"]
        return self.cli.start("cluster", "up", "--name", "dev", "--json", *options, *args)

    def up_with(self, cls: str, *args: str, rc: int = 0, **kwargs: object) -> Finished:
        done = self.start_up(cls, *args, **kwargs).finish()
        assert done.rc == rc, done
        return done

    @property
    def dev(self) -> Path:
        """The folder of the cluster dev."""
        return self.folder / ".state" / "ddptrain" / "clusters" / "dev"


@pytest.fixture
def clusters(run_cli: Cli) -> Iterator[DeployClusters]:
    made = DeployClusters(run_cli)
    yield made
    if made.entries():
        run_cli("cluster", "down", "--all", "--now")


def test_any_cluster_class_lives_from_up_to_down(clusters: DeployClusters) -> None:
    told = json.loads(clusters.up_with("classes.Quiet", "--ranks", "2").stdout)
    assert (told["state"], told["backend"], told["slots"]) == ("up", "class", 2)
    assert told["address"].startswith("tls://127.0.0.1:"), "a LocalCluster gets a certificate from us"
    keeper = clusters.process("keeper")
    assert os.getsid(keeper.pid) == keeper.pid
    files = {path.name for path in clusters.dev.iterdir() if path.stat().st_mode & 0o077 and path.is_file()}
    assert files == set(), "readable by others"
    processes = [keeper, *keeper.children(recursive=True)]

    running = clusters.start_run(ranks=2)
    refused = clusters("scale", "dev", "1", rc=2).stderr
    assert "its backend may end the very workers that these are on" in refused
    assert clusters.finish(running).rc == 0
    assert json.loads(clusters("scale", "dev", "3", "--json").stdout)["slots"] == 3
    assert json.loads(clusters("scale", "dev", "1", "--json").stdout)["slots"] == 1

    logs = json.loads(clusters("logs", "dev", "--lines", "1000", "--json").stdout)
    assert set(logs) == {"cluster", "scheduler", "worker 0"}
    assert "Scheduler at:" in logs["scheduler"] and "Registered to:" in logs["worker 0"]
    clusters("down", "dev")
    assert clusters.entries() == []
    assert is_gone(keeper)
    wait_until(lambda: all(is_gone(process) for process in processes))  # multiprocessing's own end after the keeper


def test_certificate_of_the_class_is_kept_for_later_commands(clusters: DeployClusters) -> None:
    resources = {"slot": 2}
    done = clusters.up_with("classes.Quiet", "--ranks", "2", security=True, threads_per_worker=2, resources=resources)
    view = json.loads(done.stdout)
    assert (view["tls"], view["slots"], len(view["workers"])) == (True, 2, 1), "a worker offers two slots"
    for name in ("cert.pem", "key.pem", "order.json", "keeper.log"):
        assert stat.S_IMODE((clusters.dev / name).stat().st_mode) == 0o600
    clusters.go.touch()
    assert clusters.finish(clusters.start_run(ranks=2)).rc == 0
    clusters("down", "dev")


def test_spec_cluster_is_named_by_texts_alone(clusters: DeployClusters) -> None:
    scheduler = {
        "cls": "distributed.Scheduler",
        "options": {"dashboard": False, "dashboard_address": "127.0.0.1:0", "host": "127.0.0.1", "port": 0},
    }
    workers = {name: {"cls": "distributed.Nanny", "options": {"nthreads": 1}} for name in ("left", "right")}
    done = clusters.up_with("distributed.SpecCluster", scheduler=scheduler, workers=workers)
    assert {worker["name"] for worker in json.loads(done.stdout)["workers"]} == {"left", "right"}
    refused = clusters("scale", "dev", "3", rc=4).stderr
    assert "distributed.SpecCluster can't be scaled to 3 workers, it has 2" in refused
    clusters("down", "dev")


def test_class_in_the_yaml_comes_for_a_run_and_goes_with_it(clusters: DeployClusters) -> None:
    clusters.go.touch()
    cluster = {"class": "classes.Quiet", "kwargs": {"n_workers": 2}}
    config = {"workload": "work:hold", "params": {"until": str(clusters.go)}, "cluster": cluster}
    (clusters.folder / "hold.yaml").write_text(json.dumps(config))
    done = clusters.cli("train", "hold.yaml")
    assert done.rc == 0, done
    assert done.stdout.count("holding") == 2
    assert clusters.entries() == []


@pytest.mark.parametrize(
    ("cls", "kwargs", "rc", "words"),
    [
        (
            "dask_clouds.FargateCluster",
            {},
            2,
            "no module dask_clouds (pip install dask-clouds, if that is its package)",
        ),
        ("classes.Quik", {}, 2, "the module classes has no Quik"),
        (
            "classes.Quiet",
            {"n_worker": 2},
            2,
            "cluster.kwargs: classes.Quiet got an unexpected keyword",
        ),
        ("classes.Quiet", {"processes": False}, 4, "where no other process can reach it"),
    ],
)
def test_class_that_can_not_be_built_is_told_in_a_line_and_leaves_nothing(
    clusters: DeployClusters, cls: str, kwargs: dict[str, object], rc: int, words: str
) -> None:
    done = clusters.up_with(cls, rc=rc, **kwargs)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddptrain: error:")]
    assert words in line
    assert "Traceback" not in done.stderr or "last lines of its log:" in done.stderr
    assert clusters.entries() == []


def test_keeper_that_crashes_is_told_with_what_it_wrote(clusters: DeployClusters) -> None:
    said = clusters.up_with("classes.Crashing", rc=4).stderr
    assert (
        "the process that holds the cluster (pid " in said
        and ") has ended\nlast lines of its log:\n  libcloud: out of memory" in said
    )
    assert clusters.entries() == []


def test_cluster_that_is_still_being_built_is_closed_all_the_same(clusters: DeployClusters) -> None:
    """Else what a constructor has ordered in a cloud would stay there, and cost money."""
    until = clusters.folder / "build"
    running, timeout_s = up_that_gives_up_while_it_is_built(clusters, until)
    keeper = clusters.process("keeper")
    until.touch()
    done = running.finish()
    assert done.rc == 4 and f"classes.Slow is not up after {timeout_s} s (cluster.start_timeout_s)" in done.stderr
    assert is_gone(keeper)
    assert (clusters.folder / "told").read_text() == "built, closed"
    assert clusters.entries() == []


def up_that_gives_up_while_it_is_built(clusters: DeployClusters, until: Path) -> tuple[Running, int]:
    """The command, and after how many seconds: on a busy machine the keeper may not have begun after one."""
    for timeout_s in (1, 20):
        running = clusters.start_up("classes.Slow", "--start-timeout", str(timeout_s), until=str(until))
        running.wait_for("ending what was started")
        if until.with_name("begun").exists():
            return running, timeout_s
        until.touch()
        running.finish()
        until.unlink()
    raise AssertionError("the keeper has not begun to build within 20 s")


def test_interrupted_up_closes_what_it_has_built(clusters: DeployClusters) -> None:
    running = clusters.start_up("classes.Quiet")
    running.wait_for("scheduler at")
    keeper = clusters.process("keeper")
    processes = [keeper, *keeper.children(recursive=True)]
    running.popen.send_signal(signal.SIGINT)
    assert running.finish().rc == 130
    assert is_gone(keeper)
    wait_until(lambda: all(is_gone(process) for process in processes))  # multiprocessing's own end after the keeper
    assert clusters.entries() == []


def test_cluster_that_can_not_be_closed_is_told_before_it_is_forgotten(clusters: DeployClusters) -> None:
    clusters.up_with("classes.Clinging")
    stuck = clusters("down", "dev", rc=4).stderr
    assert "classes.Clinging.close() failed: RuntimeError: AccessDenied: ecs:DeleteCluster" in stuck
    assert "what it has started may still be there; ddptrain cluster down dev deletes its record" in stuck
    clusters("down", "dev")
    assert clusters.entries() == []


def test_killed_keeper_is_seen_and_cleared_away(clusters: DeployClusters) -> None:
    clusters.up_with("classes.Quiet")
    keeper = clusters.process("keeper")
    workers = keeper.children(recursive=True)
    keeper.kill()
    began = time.monotonic()
    (view,) = clusters.listed()
    assert time.monotonic() - began < SOON_S
    assert view["state"] == "ended" and "no scheduler listens at" in view["reason"]
    assert "is not up" in clusters("scale", "dev", "2", rc=4).stderr
    told = clusters("down", "dev").stderr
    killed = f"the process that holds the cluster (pid {keeper.pid}) was killed"
    assert f"{killed}: what classes.Quiet has started on other hosts may still" in told
    assert clusters.entries() == []
    wait_until(lambda: all(is_gone(worker) for worker in workers))


@pytest.mark.slow
def test_forgotten_cluster_is_closed_but_never_one_with_a_run_on_it(clusters: DeployClusters) -> None:
    running, idle_s = clusters.start_run_before_idle(
        lambda idle: clusters.up_with("classes.Quiet", "--idle-timeout", idle), ranks=1
    )
    time.sleep(idle_s + 1)
    assert clusters.status()["state"] == "up"
    keeper = clusters.process("keeper")
    assert clusters.finish(running).rc == 0
    wait_until(lambda: is_gone(keeper))
    assert f"idle for {idle_s:g} s" in clusters.status(rc=4)["reason"]
    clusters("down", "dev")
    assert clusters.entries() == []


def test_cluster_that_closes_by_itself_is_told_as_ended(clusters: DeployClusters) -> None:
    until = clusters.folder / "enough"
    clusters.up_with("classes.Fleeting", "--idle-timeout", "60", until=str(until))
    keeper = clusters.process("keeper")
    until.touch()
    wait_until(lambda: is_gone(keeper))
    assert "classes.Fleeting has closed by itself" in clusters.status(rc=4)["reason"]
    clusters("down", "dev")
