"""Runs from Python: a program that launches them, waits, interrupts and looks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import Cli, Running

WORK = """
import time


def train(ctx, steps=2, pause_s=0.0, fail=False):
    for step in range(steps):
        ctx.log({"loss": 1.0 / (step + 1)}, step=step)
        print("step", step, flush=True)
        time.sleep(pause_s)
    if fail:
        raise ValueError("no more")
"""

# Everything at once, for each start of ranks takes seconds.
ALL = """
import asyncio, json, os, sys, threading, time
import ddptrain
from ddptrain.errors import TrainingFailed
from work import train


def of_this_script(ctx, token=""):
    print("token", token, flush=True)


def in_a_thread():
    given = {"overrides": {"env.TOKEN": "s3cret"}, "params": {"token": "t0ken"}}
    run = ddptrain.launch(of_this_script, ranks=1, cluster=sys.argv[1], **given)
    said["thread"] = [run.status, run.logs(0)]


async def in_a_loop():
    cluster = {"ranks": 2, "address": sys.argv[1]}
    config = {"workload": "work:train", "cluster": cluster, "params": {"fail": True}, "checkpoint": {"keep": 1}}
    try:
        ddptrain.launch(config, output="none")
    except TrainingFailed as error:
        said["failed"] = str(error)


if __name__ == "__main__":
    said = {}
    endless = {"steps": 1_000_000, "pause_s": 0.05}
    background = ddptrain.launch(train, ranks=1, cluster=sys.argv[1], params=endless, run_id="back", wait=False)
    said["background"] = background.status
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    asyncio.run(in_a_loop())
    thread.join()
    try:
        background.wait(0.1)
    except TimeoutError as error:
        said["timeout"] = str(error)
    while not background.metrics():
        time.sleep(0.05)
    said["metrics"] = background.metrics()[0]
    background.stop(now=True)
    said["stopped"] = background.status
    print("SAID " + json.dumps(said))
"""

INTERRUPTED = """
import sys
import ddptrain
from work import train

if __name__ == "__main__":
    ddptrain.launch(train, ranks=2, cluster=sys.argv[1], params={"steps": 1_000_000, "pause_s": 0.05}, run_id="mine")
"""


def program(run_cli: Cli, text: str, cluster: str) -> Running:
    """The program under way, which may launch the function of work.py on that cluster."""
    (run_cli.folder / "work.py").write_text(WORK)
    return run_cli.start(cluster, program=run_cli.program(text))


def status_of(folder: Path, run: str) -> str:
    return str(json.loads((folder / "runs" / run / "run.json").read_text())["status"])


def test_program_launches_in_background_in_a_thread_and_in_an_event_loop(run_cli: Cli, warm_cluster: str) -> None:
    done = program(run_cli, ALL, warm_cluster).finish()
    assert done.rc == 0, done.stderr + done.stdout
    said = json.loads(done.stdout.partition("SAID ")[2])
    assert said["background"] == "running" and said["stopped"] == "cancelled"
    assert said["timeout"] == "run back is still running after 0.1 s"
    assert said["metrics"].items() >= {"step": 0, "rank": 0, "loss": 1.0}.items()
    assert said["thread"] == ["succeeded", "token t0ken\n"]
    assert "ValueError: no more" in said["failed"] and "; log: " in said["failed"]
    assert "[rank 0] token t0ken" in done.stdout and "step 0" not in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


def test_interrupt_of_the_program_stops_the_gang(run_cli: Cli, warm_cluster: str) -> None:
    running = program(run_cli, INTERRUPTED, warm_cluster)
    running.wait_for("[rank 1] step 2")
    running.popen.send_signal(signal.SIGINT)
    done = running.finish()
    assert "KeyboardInterrupt" in done.stderr
    assert status_of(run_cli.folder, "mine") == "cancelled"


@pytest.mark.long
def test_program_that_is_killed_takes_the_run_along_that_it_waits_for(run_cli: Cli, warm_cluster: str) -> None:
    running = program(run_cli, INTERRUPTED, warm_cluster)
    running.wait_for("[rank 1] step 2")
    running.popen.kill()
    running.finish()
    shown = run_cli("results", "show", "mine", "--json")
    while '"running"' in shown.stdout:
        shown = run_cli("results", "show", "mine", "--json")
    assert json.loads(shown.stdout)["status"] == "cancelled"
