"""Runs that wait in line for the slots of a local cluster: order, priority, who holds what, and every way to leave."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.contract.conftest import INSTALLED, Project
from tests.support.command import Running

HOLD = """
    import fcntl, os, signal, time


    def train(ctx, until, slow_s=0.0):
        def slowly(*_):
            time.sleep(slow_s)
            os._exit(1)

        signal.signal(signal.SIGTERM, slowly)
        lock = open(f"slot-{ctx.local_rank if ctx.world_size == 2 else ctx.run_id}", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if two ranks are in one slot
        print("holding", flush=True)
        while not os.path.exists(until):
            time.sleep(0.02)
"""


class Box:
    """A local cluster with two slots, and the runs on it."""

    def __init__(self, project: Project) -> None:
        self.project = project
        project.write("work.py", HOLD)
        project("cluster", "up", "--name", "box", "--ranks", "2", "--gpus", "0", rc=0)

    def train(self, name: str, *options: str, ranks: int = 2, slow_s: float = 0.0) -> Running:
        params = {"until": str(self.project.folder / f"{name}-may-end"), "slow_s": slow_s}
        self.project.write(f"{name}.yaml", json.dumps({"workload": "work:train", "params": params}))
        where = ("--cluster", "box", "--ranks", str(ranks), "--run-id", name)
        return self.project.start("train", f"{name}.yaml", *where, *options)

    def holder(self, name: str, ranks: int = 2, slow_s: float = 0.0) -> Running:
        run = self.train(name, ranks=ranks, slow_s=slow_s)
        run.wait_for("holding")
        return run

    def let_end(self, run: Running, name: str) -> None:
        (self.project.folder / f"{name}-may-end").touch()
        assert run.finish().rc == 0, run.stderr


@pytest.fixture
def box(project: Project) -> Iterator[Box]:
    yield Box(project)
    project("cluster", "down", "box", "--now")


def test_line_is_served_by_priority_and_says_who_holds_what_and_since_when(box: Box) -> None:
    first = box.holder("first")
    low = box.train("low", "--wait", "2h")
    low.wait_for("number 1 in line, held by first (2 slots since ")
    watching = box.project.start("watch", "low")
    watching.wait_for("run low is queued: number 1 in line, held by first (2 slots since ")
    watching.kill_group()
    high = box.train("high", "--wait", "2h", "--set", "cluster.priority=5")
    high.wait_for("number 1 in line, held by first (2 slots since ")
    low.wait_for("number 2 in line")
    listed = json.loads(box.project("results", "list", "--json", rc=0).stdout)
    queued = {each["run_id"]: each["queued"] for each in listed}
    assert queued["first"] is None and (queued["high"]["place"], queued["low"]["place"]) == (1, 2)
    (holder,) = queued["low"]["holders"]
    assert (holder["run_id"], holder["slots"]) == ("first", 2) and abs(time.time() - holder["since"]) < 600.0
    table = box.project("results", "list", rc=0).stdout
    assert table.count("queued") == 2 and "number 2 in line" in " ".join(table.split())
    box.let_end(first, "first")
    high.wait_for("holding")
    low.wait_for("number 1 in line, held by high (2 slots since ")
    box.let_end(high, "high")
    box.let_end(low, "low")
    assert box.project.record("low")["queued"] is None


def test_waiters_leave_the_line_and_a_killed_holder_makes_room(box: Box) -> None:
    first = box.holder("first", ranks=1)
    large = box.train("large", "--wait", "1h")
    large.wait_for("number 1 in line")
    killed = box.train("killed", "--wait", "1h", ranks=1)
    killed.wait_for("number 2 in line", 60.0)  # one slot is free, but nobody passes the first
    small = box.train("small", "--wait", "1h", ranks=1)
    small.wait_for("number 3 in line")
    killed.kill_group()
    small.wait_for("number 2 in line")
    large.popen.send_signal(signal.SIGINT)
    assert large.finish().rc == 130
    small.wait_for("holding")
    large = box.train("again", "--wait", "1h")
    large.wait_for("number 1 in line")
    first.kill_group()
    large.wait_for("held by small (1 slot since ")
    large.popen.terminate()
    assert large.finish().rc == 143
    box.let_end(small, "small")
    statuses = {
        each["run_id"]: each["exit_code"] for each in json.loads(box.project("results", "list", "--json").stdout)
    }
    assert (statuses["large"], statuses["again"], statuses["small"]) == (130, 143, 0)


def test_time_in_line_ends_with_4_and_a_wrong_one_names_the_option(box: Box) -> None:
    first = box.holder("first")
    late = box.train("late", "--wait", "2s").finish()
    assert late.rc == 4 and "0 of 2 are free after 2 s, held by first (2 slots since" in late.stderr
    refused = box.train("refused").finish()
    assert refused.rc == 4 and "held by first" in refused.stderr and "--wait" in refused.stderr
    wrong = box.train("wrong", "--wait", "soon").finish()
    assert wrong.rc == 2 and "--wait soon" in wrong.stderr
    box.let_end(first, "first")


def test_runs_without_a_cluster_wait_for_the_slots_of_the_machine(project: Project) -> None:
    project.write("work.py", HOLD)

    def train(name: str, *options: str) -> Running:
        params = {"until": str(project.folder / f"{name}-may-end")}
        project.write(f"{name}.yaml", json.dumps({"workload": "work:train", "params": params, "cluster": {"gpus": 0}}))
        two_slots = ("taskset", "-c", str(min(os.sched_getaffinity(0))), *INSTALLED)
        where = ("train", f"{name}.yaml", "--run-id", name, "--ranks", "1")
        return project.cli.start(*where, *options, program=two_slots)

    first, second = train("first"), train("second")
    for run in (first, second):
        run.wait_for("holding")
    refused = train("late", "--wait", "1.5s").finish()
    assert refused.rc == 4 and "0 of 2 are free" in refused.stderr and "second (1 slot since" in refused.stderr
    low = train("low", "--wait", "1h")
    low.wait_for("number 1 in line, held by")
    high = train("high", "--wait", "1h", "--set", "cluster.priority=1")
    low.wait_for("number 2 in line")
    first.kill_group()
    high.wait_for("holding")
    low.popen.terminate()
    assert low.finish().rc == 143
    for name in ("second", "high"):
        (project.folder / f"{name}-may-end").touch()
    assert (second.finish().rc, high.finish().rc) == (0, 0)


def test_slots_of_a_killed_driver_are_free_but_no_slot_has_two_ranks(box: Box) -> None:
    """The ranks of the killed driver take their time; those that follow wait for their end on the worker."""
    killed = box.holder("killed", slow_s=1.5)
    following = box.train("following", "--wait", "1h")
    following.wait_for("number 1 in line")
    killed.kill_group()
    following.wait_for("holding")
    box.let_end(following, "following")


@pytest.mark.long
def test_two_runs_at_once_have_slots_of_their_own(box: Box) -> None:
    runs = {name: box.holder(name, ranks=1) for name in ("one", "two")}
    (status,) = json.loads(box.project("cluster", "status", "--json", rc=0).stdout)
    assert (len(status["runs"]), status["free"]) == (2, 0)
    for name, run in runs.items():
        box.let_end(run, name)
