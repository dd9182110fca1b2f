"""A run that another process drives can be watched: `ddptrain watch`, and the progress in `results show` and `list`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.contract.conftest import INSTALLED, Project, events
from tests.servers.seaweed import seaweed
from tests.support.command import Running

# Goes on until the file `go` exists, so that nothing depends on the speed of the machine.
WORK = """
    import time
    from pathlib import Path


    def train(ctx, folder, fails):
        print("an early line", flush=True)
        step = 0
        while not (Path(folder) / "go").exists():
            step += 1
            ctx.progress(min(20 * step, 300), 1200, unit="images")
            ctx.log({"train/loss": 1.0 / step}, step=step)
            time.sleep(0.05)
        print("a late line", flush=True)
        if fails and ctx.rank == 1:
            raise ValueError("bad sample")
"""
# Runs a command on a terminal of COLUMNS columns; its output is passed on.
ON_TERMINAL = """
import os, pty, sys
def output(fd):
    return os.read(fd, 4096)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], output)))
"""


def start(project: Project, cluster: str, *, fails: bool = False) -> str:
    """Start a detached run of two ranks that goes on until release(); return its id."""
    config = project.function(WORK, params={"folder": str(project.folder), "fails": fails})
    options = ("--detach", "--cluster", cluster, "--ranks", "2", "--output", "json")
    begun = json.loads(project("train", config, *options, rc=0).stdout)
    return str(begun["run_id"])


def release(project: Project) -> None:
    (project.folder / "go").touch()


def wait_for_progress(project: Project, run: str) -> dict[str, object]:
    record, deadline = project.folder / "runs" / run / "run.json", time.monotonic() + 60
    while time.monotonic() < deadline:
        progress = json.loads(record.read_bytes())["progress"]
        if progress and progress["done"] == 300 and progress["eta_s"] is not None:
            return dict(progress)
        time.sleep(0.2)
    pytest.fail(f"run.json has no progress: {record.read_text()}")


@pytest.mark.parametrize(("fails", "rc", "end"), [(False, 0, "succeeded"), (True, 1, "failed")])
def test_watch_shows_a_detached_run_to_its_end(
    project: Project, shared_cluster: str, fails: bool, rc: int, end: str
) -> None:
    run = start(project, shared_cluster, fails=fails)
    watching = project.start("watch", "latest")
    watching.wait_for("[rank 1] an early line")
    release(project)
    done = watching.finish()
    assert done.rc == rc, done.stderr
    assert "[rank 0] a late line" in done.stdout
    assert f"run {run} {end} after" in done.stdout
    if fails:
        assert f"run {run} failed: rank 1" in done.stderr
        assert "ValueError: bad sample" in done.stderr

    again = project("watch", run[:-1], "--lines", "1", rc=rc)  # the run has ended
    assert "an early line" not in again.stdout
    assert f"run {run} {end} after" in again.stdout


def test_watch_prints_json_lines(project: Project, shared_cluster: str) -> None:
    run = start(project, shared_cluster)
    watching = project.start("watch", run, "--output", "json")
    watching.wait_for('"event": "progress", "rank": 0')
    watching.wait_for('"event": "progress", "rank": 1')
    watching.wait_for('"event": "metrics"')
    release(project)
    done = watching.finish()
    assert done.rc == 0, done.stderr
    said = events(done.stdout)
    kinds = {event["event"] for event in said}
    assert {"run_started", "rank_started", "progress", "metrics", "log", "rank_ended"} <= kinds
    assert {event["rank"] for event in said if event["event"] == "progress"} == {0, 1}
    assert [event for event in said if event["event"] == "run_finished"] == [said[-1]]
    assert (said[-1]["status"], said[-1]["exit_code"], said[-1]["run_id"]) == ("succeeded", 0, run)


@pytest.mark.long
def test_watch_is_the_live_display_on_a_terminal(project: Project, shared_cluster: str) -> None:
    run = start(project, shared_cluster)
    wait_for_progress(project, run)
    watching = on_terminal(project, "watch", run)
    watching.wait_for(" 25%")
    watching.wait_for("training")
    release(project)
    done = watching.finish()
    assert done.rc == 0, done.stdout
    assert "rank 1" in done.stdout
    assert f"run {run} succeeded after" in done.stdout


EPOCHS = """
    import time
    from pathlib import Path

    import torch


    def train(ctx, folder="", lr=0.5):
        model = torch.nn.Linear(2, 2)
        for epoch in ctx.epochs(3):
            ctx.log({"val/loss": lr}, step=epoch, epoch=epoch)
            ctx.checkpoint(model=model, step=epoch, epoch=epoch, metrics={"val/loss": lr})
            while epoch == 2 and folder and not (Path(folder) / "go").exists() and not ctx.preempted:
                time.sleep(0.02)
"""


def on_terminal(project: Project, *args: str) -> Running:
    """Start a command on a terminal of 100 columns."""
    terminal = (sys.executable, "-c", ON_TERMINAL, *INSTALLED)
    return project.cli.start(*args, program=terminal, env={"TERM": "xterm", "COLUMNS": "100"})


def test_display_of_train_and_watch_has_epoch_best_metric_and_what_ctrl_c_does(
    project: Project, shared_cluster: str
) -> None:
    config = project.function(EPOCHS, params={"folder": str(project.folder)})
    training = on_terminal(project, "train", config, "--cluster", shared_cluster, "--ranks", "3")
    training.wait_for("epoch 2/3 · val/loss 0.5 (best 0.5, step 2) · saved step ")
    watching = on_terminal(project, "watch", "latest")
    watching.wait_for("epoch 2/3 · val/loss 0.5 (best 0.5, step 2) · saved step ")
    os.kill(project.record()["driver"]["pid"], signal.SIGINT)
    for running in (training, watching):
        running.wait_for("stopping: saving a checkpoint (again: at once)")
        assert running.finish().rc == 130


@pytest.mark.long
def test_watch_shows_a_run_in_a_store(project: Project) -> None:
    config = project.function(WORK, params={"folder": str(project.folder), "fails": False})
    (project.folder / "seaweed").mkdir()
    with seaweed(project.folder / "seaweed", "bucket") as env:
        place = "s3://bucket/runs"
        run = project.start("train", config, "--ranks", "1", "--runs-dir", place, "--run-id", "there", env=env)
        run.wait_for("an early line")
        watching = project.start("watch", f"{place}/there", env=env)
        watching.wait_for("[rank 0] an early line")
        release(project)
        done = watching.finish()
        assert run.finish().rc == done.rc == 0, done.stderr
        assert "[rank 0] a late line" in done.stdout
        assert "run there succeeded after" in done.stdout


@pytest.mark.long
def test_watch_shows_the_trials_of_a_sweep(project: Project) -> None:
    sweep = {"trials": 2, "metric": "val/loss", "space": {"params.lr": [0.1, 0.2]}, "search": "grid", "parallel": 1}
    config = project.function(
        EPOCHS, params={"folder": str(project.folder), "lr": 0.1}, cluster={"ranks": 1, "gpus": 0}, sweep=sweep
    )
    running = project.start("sweep", config, "--sweep-id", "tune")
    running.wait_for("sweep tune in")
    watching = on_terminal(project, "watch", "tune")
    watching.wait_for("trial 0 · val/loss 0.1 at step ")
    release(project)
    done = watching.finish()
    assert running.finish().rc == done.rc == 0, done.stdout
    assert "trial 1 complete: val/loss 0.2" in done.stdout
    assert "sweep tune succeeded after" in done.stdout
    again = events(project("watch", "tune", "--output", "json", rc=0).stdout)
    assert (again[-1]["event"], again[-1]["best"]["number"]) == ("sweep_finished", 0)


def test_ctrl_c_ends_only_the_watching(project: Project, shared_cluster: str) -> None:
    run = start(project, shared_cluster)
    watching = project.start("watch", run)
    watching.wait_for("an early line")
    os.kill(watching.popen.pid, signal.SIGINT)
    done = watching.finish()
    assert done.rc == 130
    assert f"run {run} goes on" in done.stderr
    assert project.record()["status"] == "running"
    release(project)
    project("watch", run, rc=0)


def test_watch_says_that_the_driver_was_killed(project: Project, shared_cluster: str) -> None:
    run = start(project, shared_cluster)
    watching = project.start("watch", run)
    watching.wait_for("an early line")
    os.kill(project.record()["driver"]["pid"], signal.SIGKILL)
    done = watching.finish()
    release(project)
    assert done.rc == 4, done.stderr
    assert f"run {run} failed: the driver has ended without a result" in done.stderr


def test_show_and_list_have_the_progress_of_a_running_run(project: Project, shared_cluster: str) -> None:
    run = start(project, shared_cluster)
    progress = wait_for_progress(project, run)
    assert (progress["total"], progress["unit"]) == (1200, "images")
    assert progress["ranks"] == {"0": 300, "1": 300}
    shown = project("results", "show", run, rc=0).stdout
    (line,) = (line for line in shown.splitlines() if line.strip().startswith("progress"))
    assert "25 % of 1,200 images, ETA " in line
    (row,) = (line for line in project("results", "list", rc=0).stdout.splitlines() if run in line)
    assert "25 %, ETA " in row
    release(project)
    project("watch", run, rc=0)
    assert "ETA" not in project("results", "list", rc=0).stdout


def test_watch_of_no_run(project: Project) -> None:
    done = project("watch", "nothing-here", rc=2)
    assert 'no run "nothing-here"' in done.stderr
    assert not Path(project.folder / "runs").exists()
