"""`train --submit` on a login node: sbatch, squeue and scancel are stand-ins that keep a list of jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.conftest import Project
from tests.contract.test_ui import get, start_ui
from tests.support.command import Finished

SBATCH = """#!/bin/sh
[ ! -e $JOBS/refuse ] || { echo "no such partition" >&2; exit 1; }
number=$(($(cat $JOBS/last 2>/dev/null || echo 6) + 1))
echo $number | tee $JOBS/last
touch $JOBS/job-$number
"""
SQUEUE = """#!/bin/sh
while [ "$1" != --jobs ]; do shift; done
[ ! -e $JOBS/job-$2 ] || echo "$2|PENDING|Priority"
"""
SCANCEL = "#!/bin/sh\nrm -f $JOBS/job-$1\n"


class Login:
    """A login node whose Slurm starts no job."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.jobs = project.folder / "jobs"
        self.jobs.mkdir()
        for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL}.items():
            project.write(f"bin/{name}", text).chmod(0o755)
        self.env = {"PATH": f"{project.folder / 'bin'}:{os.environ['PATH']}", "JOBS": str(self.jobs)}
        project.function("def train(ctx, steps=1): pass", cluster={"slurm": {"ranks_per_node": 1}})

    def __call__(self, *args: str, rc: int = 0) -> Finished:
        return self.project(*args, rc=rc, env=self.env)

    @property
    def run(self) -> Path:
        (found,) = self.project.run_directories()
        return found

    def listed(self) -> list[str]:
        return sorted(path.name for path in self.jobs.glob("job-*"))


@pytest.fixture
def login(project: Project) -> Login:
    return Login(project)


def test_run_is_queued_once_and_what_a_refused_job_has_changed_is_restored(login: Login) -> None:
    login("train", "work.yaml", "--submit")
    again = login("train", "work.yaml", "--submit", "--resume", login.run.name, rc=6)
    assert "is queued already" in again.stderr and login.listed() == ["job-7"]
    login("stop", "latest")
    assert login.listed() == []
    before = {name: (login.run / name).read_text() for name in ("run.json", "config.yaml")}
    (login.jobs / "refuse").touch()
    options = ("--submit", "--resume", login.run.name, "--allow-changes", "--set", "params.steps=2")
    assert "no such partition" in login("train", "work.yaml", *options, rc=4).stderr
    assert {name: (login.run / name).read_text() for name in before} == before
    (login.jobs / "refuse").unlink()
    login("train", "work.yaml", *options)
    assert [job["id"] for job in login.project.record()["jobs"]] == ["7", "8"]


def test_who_waits_for_a_run_whose_job_is_cancelled_sees_its_end(login: Login) -> None:
    login("train", "work.yaml", "--submit")
    assert "is queued in slurm job 7" in login("explain", "latest").stdout
    ui, url = start_ui(login.project)
    assert json.loads(get(f"{url}?run={login.run.name}&json=")[2])["ended"] is False
    ui.kill_group()
    (login.jobs / "job-7").unlink()
    assert "has ended without running it" in login("explain", "latest").stdout
    login("results", "logs", "latest", "--follow")
    wait = "import ddptrain; ddptrain.Run.find('latest').wait(60)"
    env = {**os.environ, **login.env}
    waited = subprocess.run([sys.executable, "-c", wait], cwd=login.project.folder, env=env, capture_output=True)
    assert b"ClusterError" in waited.stderr and b"slurm job 7 has ended without running it" in waited.stderr


def test_what_the_job_could_not_do_is_refused_at_once(login: Login) -> None:
    assert "--detach" in login("train", "work.yaml", "--submit", "--detach", rc=2).stderr
    login.project.write("loose.txt", "wordlib>=2; python_version == '3.11'\n")
    said = login("train", "work.yaml", "--submit", "--set", "code.environment=loose.txt", rc=2)
    assert "loose.txt:1" in said.stderr
    assert login.listed() == [] and login.project.run_directories() == []
