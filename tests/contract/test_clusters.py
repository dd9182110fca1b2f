"""Clusters that outlive their command: what is on disk of another version, their end, and their logs."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.contract.conftest import Project
from tests.support.command import wait_until


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
    pids = [part["pid"] for part in record["parts"]]
    assert all(map(runs, pids))
    record |= {"version": "99.0.0", "shape": "new"}
    record["host"]["kernel"] = "new"
    record["parts"][0]["cgroup"] = "new"
    del record["config"]["gpus"], record["config"]["idle_timeout_s"]
    path.write_text(json.dumps(record))
    (listed,) = json.loads(project("cluster", "status", "--json", rc=0).stdout)
    assert listed["name"] == "other"
    project("cluster", "logs", "other", rc=0)
    project("cluster", "down", "other", rc=0)
    assert not any(map(runs, pids)) and not path.exists()


@pytest.mark.long
def test_record_that_can_not_be_read_is_called_so_and_hides_no_other_cluster(project: Project) -> None:
    whole, broken = started(project, "whole"), record_of(project, "broken")
    broken.parent.mkdir()
    for text in ('{"name": "bro', '{"name": "broken", "backend": "local", "host": "text"}'):
        broken.write_text(text)
        listed = json.loads(project("cluster", "status", "--json", rc=0).stdout)
        assert [(each["name"], each["state"]) for each in listed] == [("broken", "ended"), ("whole", "up")]
        assert "can't be read" in listed[0]["reason"]
        failed = project("cluster", "down", "broken", rc=4)
        assert f"rm -r {broken.parent}" in failed.stderr
    project("cluster", "down", "whole", rc=0)
    assert not whole.exists()


def processes_in(folder: Path) -> list[str]:
    """The processes whose command line names the folder."""
    found = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if f"{folder}/" in line or line.endswith(str(folder))]


def check_kills(project: Project, moments: list[float]) -> None:
    """Kill `up` so many seconds after its folder is there: `down` leaves no process and no file."""
    folder = record_of(project, "dev").parent
    for after_s in moments:
        running = project.start("cluster", "up", "--name", "dev", "--ranks", "1", "--gpus", "0")
        wait_until(folder.exists)
        time.sleep(after_s)
        running.kill_group()
        project("cluster", "down", "dev", rc=0)
        assert not processes_in(folder) and not folder.exists(), f"killed after {after_s} s"


def test_up_that_is_killed_leaves_nothing_that_down_does_not_find(project: Project) -> None:
    check_kills(project, [0.3])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_up_that_is_killed_at_any_moment_leaves_nothing_that_down_does_not_find(project: Project) -> None:
    check_kills(project, [0.0, *(random.Random(32).uniform(0.0, upper) for upper in (*[0.05] * 8, *[3.0] * 16))])


def test_removed_command_names_what_replaces_it(project: Project) -> None:
    assert "cluster down NAME" in project("cluster", "scale", "dev", "2", rc=2).stderr


@pytest.mark.long
def test_logs_of_a_healthy_cluster_say_which_runs_got_its_slots(project: Project) -> None:
    started(project, "dev")
    config = project.function("def train(ctx):\n    pass\n")
    project("train", config, "--cluster", "dev", "--run-id", "first", rc=0)
    logs = project("cluster", "logs", "dev", rc=0).stdout
    project("cluster", "down", "dev", rc=0)
    assert "run=first" in logs and "slots reserved" in logs and "slots released" in logs
    assert "(no warnings and no errors)" in logs.partition("==> worker")[2]
