"""Clusters that outlive their command: what is on disk of another version, their end, and their logs."""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
from pathlib import Path

from tests.contract.conftest import Project


def record_of(project: Project, name: str) -> Path:
    return project.folder / ".state" / "ddptrain" / "clusters" / name / "cluster.json"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a process that has ended but has a parent has none
    except OSError:
        return False


def started(project: Project, name: str) -> Path:
    options = ("--name", name, "--ranks", "1", "--gpus", "0", "--idle-timeout", "60")
    project("cluster", "up", *options, rc=0)
    return record_of(project, name)


def test_record_of_another_version_is_listed_and_its_cluster_ended(project: Project) -> None:
    path = started(project, "other")
    record = json.loads(path.read_text())
    pids = [part["pid"] for part in record["parts"].values()]
    assert all(map(runs, pids))
    record |= {"version": "99.0.0", "shape": "new"}
    record["host"]["kernel"] = "new"
    record["parts"]["worker"]["cgroup"] = "new"
    record["parts"]["worker"]["host"]["kernel"] = "new"
    del record["settings"]["gpus"], record["settings"]["start_timeout_s"], record["idle_timeout_s"]
    path.write_text(json.dumps(record))
    (listed,) = json.loads(project("cluster", "status", "--json", rc=0).stdout)
    assert listed["name"] == "other"
    project("cluster", "logs", "other", rc=0)
    project("cluster", "down", "other", rc=0)
    assert not any(map(runs, pids)) and not path.exists()


def test_record_that_can_not_be_read_is_called_so_and_hides_no_other_cluster(project: Project) -> None:
    whole, broken = started(project, "whole"), record_of(project, "broken")
    broken.parent.mkdir()
    for text in ('{"name": "bro', '{"name": "broken", "backend": "local", "started_at": "x", "host": "text"}'):
        broken.write_text(text)
        listed = json.loads(project("cluster", "status", "--json", rc=0).stdout)
        assert [(each["name"], each["state"]) for each in listed] == [("broken", "ended"), ("whole", "up")]
        assert "can't be read" in listed[0]["reason"]
        failed = project("cluster", "down", "broken", rc=4)
        assert f"rm -r {broken.parent}" in failed.stderr
    project("cluster", "down", "whole", rc=0)
    assert not whole.exists()


def test_logs_of_a_healthy_cluster_say_which_runs_got_its_slots(project: Project) -> None:
    started(project, "dev")
    config = project.function("def train(ctx):\n    pass\n")
    project("train", config, "--cluster", "dev", "--run-id", "first", rc=0)
    logs = project("cluster", "logs", "dev", rc=0).stdout
    project("cluster", "down", "dev", rc=0)
    assert "run=first" in logs and "slots reserved" in logs and "slots released" in logs
    assert "(no warnings and no errors)" in logs.partition("==> worker")[2]


def test_stop_sends_no_signal_to_a_process_that_only_has_the_number_of_a_sweeps_driver(
    project: Project, shared_cluster: str
) -> None:
    sweep = {"space": {"params.x": [1, 2]}, "trials": 1, "metric": "loss"}
    config = project.function("def train(ctx, x=1):\n    ctx.log({'loss': 1.0}, step=1)\n", sweep=sweep)
    project("sweep", config, "--cluster", shared_cluster, "--ranks", "1", rc=0)
    (record,) = project.folder.glob("runs/*/sweep.json")
    with subprocess.Popen(["sleep", "600"]) as bystander, record.with_name("sweep.lock").open("w") as lock:
        try:
            # What a driver in a container of this name leaves, whose processes have numbers of their own.
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(f"process {bystander.pid} on {socket.gethostname()}\n")
            lock.flush()
            refused = project("stop", record.parent.name, rc=2)
            assert "another machine or container" in refused.stderr
            assert bystander.poll() is None
        finally:
            bystander.kill()
