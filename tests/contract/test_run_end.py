"""How a run ends: signals, Ctrl-C three times, the last checkpoint, and which failure decides the exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.contract.conftest import Project, pids_of
from tests.support.command import Running, wait_until

# Saves only if it is asked to end: no save is due before step 1,000,000.
_SAVES = """
    import time
    import torch

    def train(ctx):
        model = torch.nn.Linear(1, 1)
        for step in range(1, 1200):
            ctx.checkpoint(model=model, step=step)
            if step == 3 and ctx.rank == 0:
                print("at work", flush=True)
            time.sleep(0.05)
"""
_SELDOM = {"every_steps": 1_000_000}
# Saves step 1, then makes no further call.
_SAVES_ONCE = """
    import time
    import torch

    def train(ctx):
        ctx.checkpoint(model=torch.nn.Linear(1, 1), step=1)
        torch.distributed.barrier()  # each rank saves
        if ctx.rank == 0:
            print("at work", flush=True)
        {then}
"""
_NEVER = "time.sleep(600)"
# The thread that moves checkpoints into the run directory waits in fsync, as with a network file system that hangs.
_STUCK_DISK = """
    import os, threading, time

    def fsync(fd, before=os.fsync):
        while threading.current_thread().name == "ddptrain-artifacts" and not os.path.exists("disk-works"):
            time.sleep(0.05)
        before(fd)

    os.fsync = fsync
"""


def _train(project: Project, cluster: str, code: str, env: dict[str, str] | None = None, **config: object) -> Running:
    """Start a function on two ranks."""
    name = project.function(code, **config)
    return project.start("train", name, "--cluster", cluster, "--ranks", "2", env=env)


def _script(project: Project, cluster: str, code: str, *options: str) -> Running:
    """Start a script on two ranks."""
    project.write("script.py", code)
    return project.start("run", "--cluster", cluster, "--ranks", "2", *options, "script.py")


def _send(running: Running, signum: int) -> None:
    os.kill(running.popen.pid, signum)


def _checkpoints(project: Project) -> list[str]:
    (run,) = project.run_directories()
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_ctrl_c_saves_and_names_the_command_that_continues(project: Project, shared_cluster: str) -> None:
    running = _train(project, shared_cluster, _SAVES, checkpoint=_SELDOM)
    running.wait_for("at work")
    _send(running, signal.SIGINT)
    done = running.finish()
    (saved,) = _checkpoints(project)
    record = project.record()
    assert (done.rc, record["status"], record["exit_code"]) == (130, "cancelled", 130)
    assert f"{saved} is saved" in done.stderr and f"--resume {record['run_id']}" in done.stderr
    assert "again" in done.stderr  # what the next Ctrl-C does


def test_second_ctrl_c_stops_ranks_that_do_not_save(project: Project, shared_cluster: str) -> None:
    code = _SAVES_ONCE.format(then=_NEVER)
    running = _train(project, shared_cluster, code, failure={"grace_s": 300})
    running.wait_for("at work")
    _send(running, signal.SIGINT)
    running.wait_for("again")
    _send(running, signal.SIGINT)
    assert running.finish(60).rc == 130
    assert project.record()["status"] == "cancelled"


def test_third_ctrl_c_kills_the_ranks_and_the_run_is_recorded(project: Project, shared_cluster: str) -> None:
    code = """
        import os, signal, time
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("at work", flush=True)
        time.sleep(600)
    """
    running = _script(project, shared_cluster, code, "--set", "failure.grace_s=300")
    running.wait_for("[rank 0] at work")
    running.wait_for("[rank 1] at work")
    for said in ("again to stop", "kills the ranks", ""):
        _send(running, signal.SIGINT)
        if said:
            running.wait_for(said)
    assert running.finish(60).rc == 130
    record = project.record()
    assert (record["status"], record["exit_code"]) == ("cancelled", 130)
    assert not pids_of(record["run_id"])


def test_signals_end_the_wait_for_the_last_checkpoint(project: Project, shared_cluster: str) -> None:
    project.write("slow/sitecustomize.py", _STUCK_DISK)
    code = _SAVES_ONCE.format(then="pass")
    env = {"PYTHONPATH": str(project.folder / "slow")}
    running = _train(project, shared_cluster, code, env)
    running.wait_for("at work")
    (run,) = project.run_directories()
    _wait_for_line(run / "events.jsonl", '"rank_ended"', count=2)
    _send(running, signal.SIGINT)
    running.wait_for("again")
    _send(running, signal.SIGINT)
    done = running.finish(30)
    record = project.record()
    assert (done.rc, record["status"]) == (130, "cancelled")
    assert "checkpoint step-1 was not saved" in done.stderr


@pytest.mark.long
def test_transfer_that_moves_nothing_is_a_failure(project: Project, shared_cluster: str) -> None:
    project.write("slow/sitecustomize.py", _STUCK_DISK)
    code = _SAVES_ONCE.format(then="pass")
    env = {"PYTHONPATH": str(project.folder / "slow")}
    done = _train(project, shared_cluster, code, env, failure={"lost_after_s": 1}).finish(60)
    record = project.record()
    assert (done.rc, record["status"]) == (4, "failed")
    assert "checkpoint step-1" in record["failure"]["message"]


def _wait_for_line(path: Path, text: str, count: int) -> None:

    wait_until(lambda: path.read_text(encoding="utf-8").count(text) >= count)


def test_exception_after_a_signal_is_the_cause(project: Project, shared_cluster: str) -> None:
    code = _SAVES_ONCE.format(
        then="""
        while not ctx.preempted:
            time.sleep(0.02)
        raise ValueError("the disk of the snapshot is missing")"""
    )
    running = _train(project, shared_cluster, code)
    running.wait_for("at work")
    running.wait_for("ddptrain: training")  # the driver knows that all ranks are in the workload
    _send(running, signal.SIGTERM)
    done = running.finish()
    assert done.rc == 1, done.stderr
    assert "the disk of the snapshot is missing" in project.record()["failure"]["message"]


def test_message_says_that_the_checkpoint_is_older_than_the_signal(project: Project, shared_cluster: str) -> None:
    running = _train(project, shared_cluster, _SAVES_ONCE.format(then=_NEVER), failure={"grace_s": 1})
    running.wait_for("at work")
    (run,) = project.run_directories()
    _wait_for_line(run / "events.jsonl", '"checkpoint_saved"', count=1)
    _send(running, signal.SIGTERM)
    done = running.finish()
    assert done.rc == 75
    assert "no checkpoint was saved after that" in done.stderr and "step-1 is " in done.stderr


_ENDS_WITH_ZERO = """
    import signal, sys, time

    def end(number, frame):
        print("got", signal.Signals(number).name, flush=True)
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, end)
    print("at work", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("name", "rc", "status"),
    [
        ("SIGTERM", 75, "preempted"),
        ("SIGINT", 130, "cancelled"),
        pytest.param("SIGHUP", 129, "cancelled", marks=pytest.mark.long),
        pytest.param("SIGQUIT", 131, "cancelled", marks=pytest.mark.long),
    ],
)
def test_script_gets_the_signal_and_is_not_succeeded(
    project: Project, shared_cluster: str, name: str, rc: int, status: str
) -> None:
    running = _script(project, shared_cluster, _ENDS_WITH_ZERO)
    running.wait_for("[rank 0] at work")
    running.wait_for("[rank 1] at work")
    _send(running, signal.Signals[name])
    done = running.finish()
    assert (done.rc, project.record()["status"]) == (rc, status), done.stderr
    assert f"[rank 1] got {name}" in done.stdout


@pytest.mark.parametrize(
    ("signum", "rc"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_script_that_ends_with_another_code_after_a_signal_is_cancelled(
    project: Project, shared_cluster: str, signum: int, rc: int
) -> None:
    running = _script(project, shared_cluster, _ENDS_WITH_ZERO.replace("sys.exit(0)", "sys.exit(3)"))
    running.wait_for("[rank 0] at work")
    running.wait_for("[rank 1] at work")
    _send(running, signum)
    assert (running.finish().rc, project.record()["status"]) == (rc, "cancelled")


def test_script_of_which_one_rank_handles_sigterm_has_time_to_save(project: Project, shared_cluster: str) -> None:
    code = """
        import os, pathlib, signal, sys, time

        def save(number, frame):
            time.sleep(2)
            pathlib.Path("saved").touch()
            sys.exit(0)

        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, save)
        print("at work", flush=True)
        time.sleep(600)
    """
    running = _script(project, shared_cluster, code)
    running.wait_for("[rank 0] at work")
    running.wait_for("[rank 1] at work")
    _send(running, signal.SIGTERM)
    assert running.finish().rc == 143
    assert (project.folder / "saved").exists()


def test_ctrl_c_is_a_keyboard_interrupt_in_a_script(project: Project, shared_cluster: str) -> None:
    code = """
        import atexit, os, pathlib, time

        def mark(name):
            pathlib.Path(f"{name}-{os.environ['RANK']}").touch()

        atexit.register(mark, "atexit")
        try:
            print("at work", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            mark("except")
            raise
        finally:
            mark("finally")
    """
    running = _script(project, shared_cluster, code)
    running.wait_for("[rank 0] at work")
    running.wait_for("[rank 1] at work")
    _send(running, signal.SIGINT)
    done = running.finish()
    assert (done.rc, project.record()["status"]) == (130, "cancelled"), done.stderr
    marks = {f"{name}-{rank}" for name in ("atexit", "except", "finally") for rank in (0, 1)}
    assert {path.name for path in project.folder.glob("*-[01]")} == marks


def test_script_restarts_as_often_as_max_restarts_says(project: Project, shared_cluster: str) -> None:
    code = """
        import os
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
            raise RuntimeError("the same failure in each attempt")
    """
    options = ("--set", "failure.max_restarts=3")
    assert _script(project, shared_cluster, code, *options).finish().rc == 0
    assert len(project.record()["attempts"]) == 3


@pytest.mark.parametrize(
    "end",
    [
        "import atexit; atexit.register(os._exit, 7)",
        "threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), 9))).start()",
    ],
)
def test_script_fails_if_its_process_does(project: Project, shared_cluster: str, end: str) -> None:
    code = f"""
        import os, threading, time
        if os.environ["RANK"] == "1":
            {end}
    """
    running = _script(project, shared_cluster, code)
    assert running.finish().rc == 1, running.stderr
    assert project.record()["failure"]["rank"] == 1


def test_stop_that_the_user_ordered_is_no_failure(project: Project, shared_cluster: str) -> None:
    running = _train(project, shared_cluster, _SAVES, checkpoint=_SELDOM)
    running.wait_for("at work")
    stopped = project("stop", "latest", rc=0)
    assert running.finish().rc == 75
    assert "stopped (saved)" in stopped.stdout
    assert "stopped (saved)" in project("results", "list", rc=0).stdout
    shown = project("results", "show", "latest", rc=0).stdout
    assert "stopped (saved)" in shown and "fail" not in shown.lower()
