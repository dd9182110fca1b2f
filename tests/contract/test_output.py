"""What a run shows in a pipe and on a terminal, and the files that hold what it showed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.contract.conftest import INSTALLED, Project

LOGS = """
    import time


    def train(ctx, prints=False):
        for epoch in ctx.epochs(3):
            for step in range(4 * epoch - 3, 4 * epoch + 1):
                ctx.progress(step, 12, unit="steps")
            value = ctx.mean(float(ctx.rank))  # 0.5 with two ranks; each epoch ends on all ranks at the same time
            ctx.log({"lr": 0.1, "train/loss": value / epoch}, step=step, epoch=epoch)
            ctx.log({"val/loss": value}, step=step, epoch=epoch)
            if prints and ctx.rank == 0:
                print(f"my line of epoch {epoch}", flush=True)
"""


def epoch_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("ddptrain: epoch ")]


def test_function_that_only_logs_has_a_line_for_each_epoch_in_a_pipe(project: Project, shared_cluster: str) -> None:
    config = project.function(LOGS)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    first, second, third = epoch_lines(done.stderr)
    assert first.startswith("ddptrain: epoch 1/3, step 4, train/loss 0.5, val/loss 0.5, lr 0.1")
    assert second.startswith("ddptrain: epoch 2/3, step 8, train/loss 0.25, val/loss 0.5, lr 0.1")
    assert third.startswith("ddptrain: epoch 3/3, step 12, train/loss 0.1667, val/loss 0.5, lr 0.1")
    assert "epoch 1/3" not in done.stdout


def test_metrics_without_epoch_belong_to_the_epoch_of_the_loop(project: Project, shared_cluster: str) -> None:
    config = project.function(
        """
        def train(ctx):
            for epoch in ctx.epochs(2):
                ctx.log({"loss": 1.0 / epoch})
        """
    )
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "1", rc=0)
    first, second = epoch_lines(done.stderr)
    assert first.startswith("ddptrain: epoch 1/2, loss 1")
    assert second.startswith("ddptrain: epoch 2/2, loss 0.5")


def test_function_that_prints_its_epochs_has_no_second_line_for_them(project: Project, shared_cluster: str) -> None:
    config = project.function(LOGS, params={"prints": True})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert "[rank 0] my line of epoch 3" in done.stdout
    assert epoch_lines(done.stderr) == []


def test_built_in_workload_prints_each_epoch_once(project: Project, shared_cluster: str) -> None:
    project.write("names.txt", "".join(f"an{letter}a\n" for letter in "abcdefghijklmnopqrst"))
    config = project.write(
        "names.yaml",
        "workload: petnames\nparams: {epochs: 2, names: names.txt}\ncluster: {ranks: 2}\n",
    )
    done = project("train", config, "--cluster", shared_cluster, rc=0)
    shown = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"\bepoch \d/2", line)]
    assert [line.partition(":")[0] for line in shown] == ["[rank 0] epoch 1/2", "[rank 0] epoch 2/2"]


# Runs a command on a terminal of 120 columns; its output is passed on.
ON_TERMINAL = """
import fcntl, os, pty, struct, sys, termios
pid, fd = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 35, 120, 0, 0))
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    try:
        data = os.read(fd, 4096)
    except OSError:
        break
    if not data:
        break
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
WAITS = """
    import time
    from pathlib import Path

    import torch


    def train(ctx, folder):
        model = torch.nn.Linear(1, 1)
        for epoch in ctx.epochs(3):
            ctx.progress(epoch, 3, unit="steps")
            ctx.log({"val/loss": 1.0 / epoch}, step=epoch)
            ctx.checkpoint(model=model, step=epoch, epoch=epoch, metrics={"val/loss": 1.0 / epoch})
            while epoch == 2 and not (Path(folder) / "go").exists():
                time.sleep(0.05)
"""


def test_live_display_names_epoch_metric_and_checkpoint(project: Project, shared_cluster: str) -> None:
    config = project.function(WAITS, params={"folder": str(project.folder)})
    command = (*INSTALLED, "train", config, "--cluster", shared_cluster, "--ranks", "1")
    running = project.cli.start(
        *command, program=(sys.executable, "-c", ON_TERMINAL), env={"TERM": "xterm", "CI": "", "NO_COLOR": "1"}
    )
    running.wait_for(" epoch 2/3 ")
    running.wait_for(" saved step 2, ")
    running.wait_for(" val/loss 0.5 (best 0.5, step 2)")
    (project.folder / "go").touch()
    assert running.finish().rc == 0


@pytest.mark.long
def test_pages_of_two_runs_do_not_overwrite_each_other(project: Project, shared_cluster: str) -> None:
    config = project.function("def train(ctx):\n    pass\n")
    for run in ("first", "second"):
        project("train", config, "--cluster", shared_cluster, "--ranks", "1", "--run-id", run, rc=0)
        project("results", "report", run, rc=0)
    project("results", "report", "first", "second", rc=0)
    pages = {path.name for path in project.folder.glob("*.html")}
    assert pages == {"first.html", "second.html", "report.html"}


def test_run_has_one_file_named_driver_log(project: Project, shared_cluster: str) -> None:
    config = project.function("def train(ctx):\n    pass\n")
    project("train", config, "--cluster", shared_cluster, "--ranks", "1", "--run-id", "r", "--detach", rc=0)
    project("results", "logs", "r", "--follow", rc=0)
    found = [str(path.relative_to(project.folder / "runs" / "r")) for path in Path(project.folder).rglob("driver.log")]
    assert found == ["driver.log"]
    assert (project.folder / "runs" / "r" / "logs" / "ddptrain.log").stat().st_size
