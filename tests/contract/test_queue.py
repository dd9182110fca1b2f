"""Runs that wait in line for the slots of a local cluster: order, priority, who holds what, and every way to leave."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest

from tests.contract.conftest import Project
from tests.support.command import Running

HOLD = """
    import os, time


    def train(ctx, until):
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

    def train(self, name: str, *options: str, ranks: int = 2) -> Running:
        params = {"until": str(self.project.folder / f"{name}-may-end")}
        self.project.write(f"{name}.yaml", json.dumps({"workload": "work:train", "params": params}))
        where = ("--cluster", "box", "--ranks", str(ranks), "--run-id", name)
        return self.project.start("train", f"{name}.yaml", *where, *options)

    def holder(self, name: str, ranks: int = 2) -> Running:
        run = self.train(name, ranks=ranks)
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
    wrong = box.train("wrong", "--wait", "soon").finish()
    assert wrong.rc == 2 and "--wait soon" in wrong.stderr
    box.let_end(first, "first")
