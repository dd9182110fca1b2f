"""A run that is started again after a failure: from where, with which code, and what is known of the failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from tests.contract.conftest import INSTALLED, Project

CRASH = """
    import os, signal

    def train(ctx):
        ctx.mean(1.0)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.log({"loss": 1.0}, step=1)
"""


def test_cause_of_a_failed_attempt_is_named_after_the_next_one_succeeded(project: Project, shared_cluster: str) -> None:
    config = project.function(CRASH, failure={"max_restarts": 1})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    (host,) = {rank["host"] for rank in project.record()["attempts"][0]["ranks"]}
    cause = f"attempt 1: rank 1 on {host} failed first: killed by SIGKILL"
    assert f"  failed  {cause}" in done.stdout.splitlines()
    assert project.record()["attempts"][0]["failure"]["message"] == "killed by SIGKILL"
    assert project.record()["attempts"][1]["failure"] is None
    shown = project("results", "show", "latest", rc=0).stdout
    assert "failed attempts" in shown and f"rank 1 on {host} failed first: killed by SIGKILL" in shown
    project("results", "report", "latest", "--output", "page.html", rc=0)
    assert f"Failed {cause}" in (project.folder / "page.html").read_text()


def _can_unshare() -> bool:
    command = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or not _can_unshare(), reason="needs root and mount namespaces")
def test_restart_uses_the_code_of_the_first_attempt(project: Project) -> None:
    """The workers don't see the folder of the code, as on other hosts; the code is edited while the run trains."""
    project.write(
        "code/work.py",
        """
        import os, time

        def train(ctx, edited):
            print("version 1")
            ctx.mean(1.0)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                while not os.path.exists(edited):
                    time.sleep(0.05)
                os._exit(3)
        """,
    )
    config = {
        "workload": "work:train",
        "params": {"edited": str(project.folder / "edited")},
        "failure": {"max_restarts": 1},
        "results": {"dir": str(project.folder / "runs")},
    }
    project.write("code/work.yaml", json.dumps(config))
    hide = 'mount -t tmpfs none code && exec "$0" cluster up --name far --ranks 2 --gpus 0 --idle-timeout 600'
    unshared = ("unshare", "--mount", "bash", "-c", hide, INSTALLED[0])
    up = project.cli(program=unshared, env={"XDG_CACHE_HOME": str(project.folder / "cache")})
    assert up.rc == 0, up.stderr
    try:
        running = project.start("train", "code/work.yaml", "--cluster", "far", "--ranks", "1")
        running.wait_for("version 1")
        work = project.folder / "code/work.py"
        work.write_text(work.read_text().replace("version 1", "version 2"))
        (project.folder / "edited").touch()
        done = running.finish()
        assert done.rc == 0, done.stderr
        assert done.stdout.count("version 1") == 2 and "version 2" not in done.stdout
        fresh = project(
            "train", "code/work.yaml", "--cluster", "far", "--ranks", "1", "--set", "failure.max_restarts=0"
        )
        assert "version 2" in fresh.stdout, fresh.stderr
    finally:
        project("cluster", "down", "far", "--now", rc=0)
