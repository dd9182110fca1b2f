"""What `ddptrain results` and `train` say about runs on disk, also about those of other hosts and other drivers."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.command import PATIENCE_S
from tests.contract.conftest import Project

# Imported by every Python program that has it on PYTHONPATH: the clock of this host is two minutes ahead of the others.
CLOCK_AHEAD = """
import time
real = time.time
time.time = lambda: real() + 120.0
"""


def run_of_another_host(project: Project, heartbeat_age_s: float) -> None:
    """Write the directory of a run whose driver is on another host, and touched its heartbeat so many seconds ago."""
    record = {"run_id": "far", "status": "running", "driver": {"pid": 1, "host": "another-host", "boot_id": "x"}}
    project.write("runs/far/run.json", json.dumps(record))
    project.write("runs/far/run.lock", "process 1 on another-host\n")
    heartbeat = project.write("runs/far/.heartbeat", "{}")
    then = time.time() - heartbeat_age_s
    os.utime(heartbeat, (then, then))


@pytest.mark.parametrize(("age_s", "status"), [(0.0, "running"), (60.0, "failed")])
def test_driver_of_another_host_is_judged_without_its_clock(project: Project, age_s: float, status: str) -> None:
    project.write("ahead/sitecustomize.py", CLOCK_AHEAD)
    run_of_another_host(project, age_s)
    shown = project("results", "show", "far", "--json", rc=0, env={"PYTHONPATH": str(project.folder / "ahead")})
    assert json.loads(shown.stdout)["status"] == status
    assert [path.name for path in (project.folder / "runs/far").glob(".*")] == [".heartbeat"]


def test_run_id_whose_folder_another_driver_deletes_is_refused(project: Project) -> None:
    """The other driver holds the lock, fails before its run.json is written, and deletes the folder."""
    lock = project.write("runs/mine/run.lock", "process 1 on another-host\n")
    config = project.function("def train(ctx):\n    pass\n", cluster={"ranks": 1})
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # a driver waits longer for a shared lock
        running = project.start("train", config, "--run-id", "mine")
        deadline = time.monotonic() + PATIENCE_S
        while not opened(running.popen.pid, lock):
            assert running.popen.poll() is None and time.monotonic() < deadline, running.stderr
            time.sleep(0.01)
        shutil.rmtree(lock.parent)
    done = running.finish()
    assert done.rc == 6, done.stderr
    assert "run mine was deleted by another process" in done.stderr


def opened(pid: int, path: Path) -> bool:
    """Whether a process has a file open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(descriptor))
        except OSError:  # it was closed meanwhile
            continue
    return str(path) in found
