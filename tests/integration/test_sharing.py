"""Several runs on one cluster: a slot is never given twice, and who must wait is told its place."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, Cli, Running

WORKLOAD = '''
import fcntl, os, signal, time


def hold(ctx, until, slow_s=0.0):
    """Holds a lock file for its slot (two ranks have both) until a file appears; ends `slow_s` after SIGTERM."""
    def slowly(*_):
        print("told to end", flush=True)
        time.sleep(slow_s)
        os._exit(1)
    signal.signal(signal.SIGTERM, slowly)
    lock = open(f"slot-{ctx.local_rank if ctx.world_size == 2 else ctx.run_id}", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RuntimeError("two ranks in one slot") from None
    print("holding", flush=True)
    while not os.path.exists(until):
        time.sleep(0.02)
'''


class Shared:
    """A cluster with two slots, and a test's runs on it."""

    def __init__(self, cli: Cli, state: Path) -> None:
        self.cli, self.env = cli, {"XDG_STATE_HOME": str(state)}
        (cli.folder / "work.py").write_text(WORKLOAD)

    def run(self, name: str, ranks: int = 2, wait_s: float = 60.0, **params: object) -> Running:
        config = self.cli.folder / f"{name}.yaml"
        cluster = {"name": "shared", "ranks": ranks, "wait_s": wait_s}
        given = {"until": str(self.cli.folder / f"{name}-may-end"), **params}
        config.write_text(json.dumps({"workload": "work:hold", "params": given, "cluster": cluster}))
        return self.cli.start("train", config, "--run-id", name, env=self.env)

    def let_end(self, name: str) -> None:
        (self.cli.folder / f"{name}-may-end").touch()

    def status(self) -> dict[str, Any]:
        shown = self.cli.look("status", "shared", "--json", env=self.env)
        assert shown.rc == 0, shown
        told: dict[str, Any] = json.loads(shown.stdout)
        return told

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, status
        return status


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a machine knows whose cluster is up."""
    cli = Cli(tmp_path_factory.mktemp("shared"))
    done = cli("cluster", "up", "--name", "shared", "--ranks", "2", "--gpus", "0")
    assert done.rc == 0, done.stderr
    yield cli.folder / ".state"
    down = cli("cluster", "down", "shared", "--now")
    assert down.rc == 0, down.stderr


@pytest.fixture
def shared(run_cli: Cli, state: Path) -> Shared:
    return Shared(run_cli, state)


def test_line_is_first_come_first_served_and_tells_the_place(shared: Shared) -> None:
    first = shared.run("first")
    first.wait_for("holding")
    second = shared.run("second")
    second.wait_for("number 1 in line, held by first")
    third = shared.run("third")
    third.wait_for("number 2 in line, held by first")
    listed = shared.cli("results", "list", "--json")
    found = {run["run_id"]: (run["status"], run["waiting"]) for run in json.loads(listed.stdout)}
    assert found == {"first": ("running", False), "second": ("running", True), "third": ("running", True)}
    assert sorted(shared.cli("results", "list").stdout.split()).count("waiting") == 2
    waiting = shared.status()["waiting"]
    assert [(each["run_id"], each["place"], each["asked"]) for each in waiting] == [("second", 1, 2), ("third", 2, 2)]
    shared.let_end("first")
    second.wait_for("holding")
    third.wait_for("number 1 in line, held by second")
    shared.let_end("second")
    third.wait_for("holding")
    shared.let_end("third")
    assert [run.finish().rc for run in (first, second, third)] == [0, 0, 0]


def test_run_that_does_not_wait_ends_with_4_and_names_who_holds_the_slots(shared: Shared) -> None:
    holder = shared.run("holder")
    holder.wait_for("holding")
    refused = shared.run("refused", wait_s=0).finish()
    assert refused.rc == 4
    assert re.search(r"2 slots are needed, but 0 of 2 are free after \d+ s, held by holder", refused.stderr)
    late = shared.run("late", wait_s=1.5).finish()
    told = re.search(r"after (\d+) s, held by holder", late.stderr)
    assert late.rc == 4 and told and int(told[1]) >= 2  # 1.5, rounded
    assert "Wait in line with cluster.wait_s" in refused.stderr and "Wait longer with cluster.wait_s" in late.stderr
    shared.let_end("holder")
    assert holder.finish().rc == 0


def test_driver_that_dies_gives_its_slots_back_but_no_slot_has_two_ranks(shared: Shared) -> None:
    """The ranks of the dead driver take their time; those that follow wait for their end on the worker."""
    killed = shared.run("killed", slow_s=1.5)
    killed.wait_for("holding")
    following = shared.run("following")
    following.wait_for("number 1 in line")
    killed.kill_group()
    shared.wait_until(lambda status: [run["run_id"] for run in status["runs"]] == ["following"])
    following.wait_for("holding")
    shared.let_end("following")
    ended = following.finish()
    assert ended.rc == 0, ended.stderr
