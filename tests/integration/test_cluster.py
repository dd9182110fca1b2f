"""`ddptrain cluster` with real processes on loopback: clusters that stay up, break, end by themselves, are shared."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Cli, Finished, Running
from tests.servers.dask_cluster import write_tls
from tests.support.command import wait_until

IDLE_S = 6.0  # a run has begun before, unless the machine is very busy

# Runs until a file says that it may end.
WORKLOAD = """
import os, time
import torch.distributed as dist


def hold(ctx, until):
    dist.barrier()  # a rank that ends while another one still connects would fail it
    print("holding", flush=True)
    while not os.path.exists(until):
        time.sleep(0.02)
"""


class Clusters:
    """Clusters of a test, and what it knows of their processes."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.folder = cli.folder
        self.go = cli.folder / "go"
        (cli.folder / "work.py").write_text(WORKLOAD)

    def __call__(self, *args: str, rc: int = 0, env: dict[str, str] | None = None) -> Finished:
        is_look = args[0] == "status"
        done = self.cli.look(*args, env=env) if is_look else self.cli("cluster", *args, env=env)
        assert done.rc == rc, done
        return done

    def up(self, *args: str, name: str = "dev", ranks: int = 2) -> dict[str, Any]:
        """A cluster that is up, as --json tells it."""
        done = self("up", "--name", name, "--ranks", str(ranks), "--gpus", "0", "--json", *args)
        view: dict[str, Any] = json.loads(done.stdout)
        return view

    def status(self, name: str = "dev", rc: int = 0) -> dict[str, Any]:
        view: dict[str, Any] = json.loads(self("status", name, "--json", rc=rc).stdout)
        return view

    def listed(self) -> list[dict[str, Any]]:
        views: list[dict[str, Any]] = json.loads(self("status", "--json").stdout)
        return views

    def entries(self) -> list[str]:
        """The folders of all clusters."""
        folder = self.folder / ".state" / "ddptrain" / "clusters"
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []

    def record(self, name: str = "dev") -> dict[str, Any]:
        path = self.folder / ".state" / "ddptrain" / "clusters" / name / "cluster.json"
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded

    def process(self, part: str, name: str = "dev") -> psutil.Process:
        return psutil.Process(next(p["pid"] for p in self.record(name)["parts"] if p["role"] == part))

    def start_run(self, cluster: str = "dev", ranks: int = 2, *args: str) -> Running:
        """A run that holds its slots until `go` is there."""
        running = self.launch(cluster, ranks, *args)
        running.wait_for("holding")
        return running

    def launch(self, cluster: str, ranks: int, *args: str) -> Running:
        """The same, which may not have begun yet."""
        config = self.folder / "hold.yaml"
        config.write_text(json.dumps({"workload": "work:hold", "params": {"until": str(self.go)}}))
        return self.cli.start("train", config, "--cluster", cluster, "--ranks", str(ranks), *args)

    def start_run_before_idle(self, up: Callable[[str], object], ranks: int = 2) -> tuple[Running, float]:
        """A run on a cluster that ends when it was forgotten, and for how long; a slow machine is given longer."""
        for idle_s in (IDLE_S, 4 * IDLE_S):
            up(f"{idle_s:g}")
            running = self.launch("dev", ranks)
            wait_until(partial(_has_begun_or_ended, running))
            if running.popen.poll() is None:
                return running, idle_s
            self("down", "dev")
        raise AssertionError(running.finish())

    def finish(self, running: Running) -> Finished:
        self.go.touch()
        return running.finish()


@pytest.fixture
def clusters(run_cli: Cli) -> Iterator[Clusters]:
    made = Clusters(run_cli)
    yield made
    if made.entries():
        run_cli("cluster", "down", "--all", "--now")


def _has_begun_or_ended(running: Running) -> bool:
    return "holding" in running.stdout or running.popen.poll() is not None


def is_gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def test_cluster_outlives_the_command_trains_twice_and_leaves_nothing(clusters: Clusters) -> None:
    done = clusters("up", "--name", "dev", "--ranks", "2", "--gpus", "0")
    told = [line.removeprefix("ddptrain: ") for line in done.stderr.splitlines()]
    address = clusters.record()["address"]
    assert told == [f"scheduler at {address}", "1 of 1 worker joined, 2 slots", "warm"]
    assert address.startswith("tls://127.0.0.1:") and address in done.stdout and "cluster dev" in done.stdout
    view = clusters.status()
    assert (view["name"], view["state"], view["address"]) == ("dev", "up", address)
    assert (view["slots"], view["free"], view["gpus"], view["hosts"]) == (2, 2, 0, ["127.0.0.1"])
    wait_until(lambda: [worker["warm"] for worker in clusters.status()["workers"]] == [True])  # after a heartbeat
    processes = [clusters.process(part) for part in ("scheduler", "worker")]
    assert all(os.getsid(process.pid) == process.pid for process in processes)
    for part in processes:
        listening = [item for item in part.net_connections("tcp") if item.status == psutil.CONN_LISTEN]
        assert {item.laddr.ip for item in listening} == {"127.0.0.1"}

    settings = ["--set", "params.epochs=1", "--runs-dir", "runs"]
    trained = clusters.cli("train", "petnames", "--cluster", "dev", *settings)
    assert trained.rc == 0, trained
    nameless = clusters.cli("train", "petnames", "--cluster", "dev", *settings, "--set", "params.names=missing.txt")
    assert nameless.rc == 2 and "Traceback" not in nameless.stderr + nameless.stdout
    assert " failed: can't read params.names 'missing.txt': " in nameless.stderr
    assert "missing.txt does not exist; a path is relative to the working directory" in nameless.stderr
    assert clusters.finish(clusters.start_run()).rc == 0
    assert clusters.status()["free"] == 2

    assert "cluster dev is up at tls:" in clusters("up", "--name", "dev", rc=2).stderr
    assert "dev   up     local    2      2" in clusters("status").stdout
    clusters("down", "dev")
    assert clusters.entries() == []
    assert all(is_gone(process) for process in processes)
    assert "no clusters" in clusters("status").stderr


def test_killed_scheduler_is_told_soon_and_cleared_away(clusters: Clusters) -> None:
    clusters.up()
    scheduler, worker = clusters.process("scheduler"), clusters.process("worker")
    scheduler.kill()
    (view,) = clusters.listed()
    assert view["state"] == "ended" and "no scheduler listens at" in view["reason"]
    assert "no scheduler listens at" in clusters("status", "dev", rc=4).stdout
    wait_until(lambda: is_gone(worker))  # it ends with its scheduler
    clusters("down", "dev")
    assert clusters.entries() == []


@pytest.mark.long
def test_killed_worker_is_named_with_what_to_do(clusters: Clusters) -> None:
    clusters.up()
    clusters.process("worker").kill()
    wait_until(lambda: clusters.status()["slots"] == 0)
    assert "1 worker; ddptrain cluster down dev and up again" in clusters("status", "dev").stdout
    refused = clusters("up", "--name", "dev", "--ranks", "2", "--gpus", "0", "--if-needed", rc=4)
    assert "has lost 1 worker" in refused.stderr
    trained = clusters.cli("train", "petnames", "--cluster", "dev", "--set", "params.epochs=1")
    assert trained.rc == 4 and "ddptrain cluster up --name dev" in trained.stderr


@pytest.mark.long
def test_status_shows_who_holds_slots_and_who_waits_for_them_and_down_now_ends_both(clusters: Clusters) -> None:
    clusters.up()
    first = clusters.start_run()
    config = ["train", "hold.yaml", "--cluster", "dev", "--ranks", "2", "--run-id", "second"]
    second = clusters.cli.start(*config, "--set", "cluster.wait_s=60")
    wait_until(lambda: bool(clusters.status()["waiting"]))
    view = clusters.status()
    assert [(run["slots"], run["hosts"]) for run in view["runs"]] == [(2, ["127.0.0.1"])]
    assert [(run["run_id"], run["place"], run["asked"]) for run in view["waiting"]] == [("second", 1, 2)]
    shown = clusters("status", "dev").stdout
    assert "1. second  for 2 slots, for " in shown and f"{view['runs'][0]['run_id']}  2 slots on 127.0.0.1" in shown
    assert "second" in clusters("down", "dev", rc=2).stderr  # who waits counts as well
    done = clusters("down", "--all", "--now", "--json")
    assert json.loads(done.stdout) == {"ended": ["dev"], "failed": {}}
    assert (first.finish().rc, second.finish().rc) == (4, 4)


@pytest.mark.long
def test_two_ups_if_needed_at_once_both_succeed_with_one_cluster(clusters: Clusters) -> None:
    command = ["cluster", "up", "--name", "dev", "--ranks", "1", "--gpus", "0", "--if-needed", "--json"]
    done = [running.finish() for running in [clusters.cli.start(*command) for _ in range(2)]]
    assert [each.rc for each in done] == [0, 0], done
    views = [json.loads(each.stdout) for each in done]
    assert views[0]["address"] == views[1]["address"] and views[0]["started_at"] == views[1]["started_at"]
    assert "the cluster dev is up already" in done[0].stderr + done[1].stderr
    assert (
        "with other settings (cluster.ranks)"
        in clusters("up", "--name", "dev", "--gpus", "0", "--if-needed", rc=2).stderr
    )
    clusters("down", "dev")
    assert "nothing to end" in clusters("down", "dev").stderr


@pytest.mark.parametrize(
    ("number", "rc"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_interrupted_up_takes_everything_back(clusters: Clusters, number: int, rc: int) -> None:
    waiting = clusters.folder / "waiting" / "torch"
    waiting.mkdir(parents=True)
    (waiting / "__init__.py").write_text("import time\ntime.sleep(1000)")  # so the worker does not become warm
    env = {"PYTHONPATH": os.pathsep.join([str(waiting.parent), os.environ.get("PYTHONPATH", "")])}
    running = clusters.cli.start("cluster", "up", "--name", "dev", "--ranks", "1", "--gpus", "0", env=env)
    running.wait_for("scheduler at")
    processes = [clusters.process(part) for part in ("scheduler", "worker")]
    running.popen.send_signal(number)
    done = running.finish()
    assert done.rc == rc and f"interrupted by {signal.Signals(number).name}" in done.stderr
    assert clusters.entries() == []
    assert all(is_gone(process) for process in processes)


@pytest.mark.long
def test_up_whose_worker_can_not_work_says_why_and_leaves_nothing(clusters: Clusters) -> None:
    broken = clusters.folder / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.99 is not there')")
    env = {"PYTHONPATH": os.pathsep.join([str(broken.parent), os.environ.get("PYTHONPATH", "")])}
    done = clusters("up", "--name", "dev", "--gpus", "0", rc=4, env=env)
    assert "(127.0.0.1) can't be used" in done.stderr
    assert "ImportError: libcudart.so.99 is not there" in done.stderr
    assert clusters.entries() == []


@pytest.mark.slow
def test_forgotten_cluster_ends_but_never_one_with_a_run_on_it(clusters: Clusters) -> None:
    running, idle_s = clusters.start_run_before_idle(lambda idle: clusters.up("--idle-timeout", idle))
    refused = clusters("down", "dev", rc=2).stderr
    assert "the cluster dev is in use by hold-" in refused and "--now" in refused
    time.sleep(idle_s + 1)
    assert clusters.status()["state"] == "up"
    processes = [clusters.process(part) for part in ("scheduler", "worker")]
    assert clusters.finish(running).rc == 0
    wait_until(lambda: all(is_gone(process) for process in processes))
    view = clusters.status(rc=4)
    assert view["state"] == "ended" and f"idle for {idle_s:g} s" in view["reason"]
    clusters("down", "dev")
    assert clusters.entries() == []


def test_cluster_with_tls_takes_only_those_who_have_its_certificate(clusters: Clusters, tmp_path: Path) -> None:
    address = clusters.up()["address"]
    assert address.startswith("tls://")
    folder = tmp_path / ".state" / "ddptrain" / "clusters" / "dev"
    kept = {path.name: oct(path.stat().st_mode)[-3:] for path in folder.iterdir() if path.is_file()}
    assert set(kept.values()) == {"600"} and {"cert.pem", "key.pem", "cluster.json", "scheduler.json"} <= kept.keys()
    assert oct(folder.stat().st_mode)[-3:] == "700"
    clusters.go.touch()
    assert clusters.finish(clusters.start_run("dev")).rc == 0
    assert clusters.finish(clusters.start_run(address)).rc == 0  # the address of an own cluster is recognised

    write_tls(tmp_path)
    wrong = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": str(tmp_path / pem) for name, pem in _PEM.items()}
    stranger = {"XDG_STATE_HOME": str(tmp_path / "stranger")}
    for given in ({}, wrong):
        config = ["petnames", "--cluster", address, "--set", "cluster.start_timeout_s=20"]
        done = clusters.cli("train", *config, env={**stranger, **given})
        assert done.rc == 4, done
        assert "certificate" in done.stderr, done.stderr


_PEM = {"CA_FILE": "cert.pem", "CLIENT__CERT": "cert.pem", "CLIENT__KEY": "key.pem"}
