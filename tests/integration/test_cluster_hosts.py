"""A cluster record in a home directory that two hosts share: on the other host nothing is checked, ended or deleted."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli, Finished
from tests.servers import netns
from tests.servers.netns import Host

pytestmark = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())

HERE = os.uname().nodename


@pytest.fixture
def login2(tmp_path: Path) -> Iterator[Host]:
    """Another host with the same home directory: its own name, processes and loopback."""
    host = Host("login2", "", tmp_path / "login2")
    host.boot()
    yield host
    host.power_off()


@pytest.fixture
def dev(run_cli: Cli) -> Iterator[str]:
    up = run_cli("cluster", "up", "--name", "dev", "--ranks", "1", "--gpus", "0")
    assert up.rc == 0, up
    yield "dev"
    if (run_cli.folder / ".state" / "ddptrain" / "clusters" / "dev").exists():
        run_cli("cluster", "down", "dev", "--now")


def test_every_command_on_another_host_says_where_to_run_it(run_cli: Cli, dev: str, login2: Host) -> None:
    there = [*login2.enter(run_cli.folder), sys.executable, "-m", "ddptrain"]
    where = f"runs on the host {HERE}, and this is login2: run the command on {HERE}"

    def on_login2(*args: str) -> Finished:
        return run_cli(*args, program=there)

    for command in (["down", dev, "--now"], ["down", "--all"], ["logs", dev]):
        done = on_login2("cluster", *command)
        assert done.rc == 4 and where in done.stderr and "is down" not in done.stdout, done
    up = on_login2("cluster", "up", "--name", dev, "--gpus", "0")
    assert up.rc == 4 and where in up.stderr, up
    status = on_login2("cluster", "status", dev)
    assert status.rc == 4 and f"elsewhere: it {where}" in status.stdout, status
    (view,) = json.loads(on_login2("cluster", "status", "--json").stdout)
    assert (view["state"], view["host"]) == ("elsewhere", HERE)
    trained = on_login2("train", "petnames", "--cluster", dev)
    assert trained.rc == 4 and where in trained.stderr, trained

    status = run_cli.look("status", dev)
    assert status.rc == 0 and f"UTC on {HERE}" in status.stdout, status
    down = run_cli("cluster", "down", dev)
    assert (down.rc, down.stdout) == (0, f"cluster {dev} is down\n"), down


def test_after_a_restart_the_processes_in_a_record_are_not_taken_for_ours(run_cli: Cli, dev: str) -> None:
    """A restart can't be made here: instead the record is given an earlier boot, while its pids are taken."""
    path = run_cli.folder / ".state" / "ddptrain" / "clusters" / dev / "cluster.json"
    record = json.loads(path.read_text())
    text = json.dumps(record)
    boot = record["host"]["boot"]
    host = path.with_name("host.json")  # of the processes
    assert boot and text.count(boot) == host.read_text().count(boot) == 1
    hosts = host.read_text()
    path.write_text(text.replace(boot, "an-earlier-boot"))
    host.write_text(hosts.replace(boot, "an-earlier-boot"))
    try:
        (view,) = json.loads(run_cli("cluster", "status", "--json").stdout)
        assert (view["state"], view["reason"]) == ("ended", f"{HERE} was restarted after the cluster was started")
        trained = run_cli("train", "petnames", "--cluster", dev)
        assert trained.rc == 4 and "was restarted after the cluster dev was started" in trained.stderr, trained
        down = run_cli("cluster", "down", dev)
        assert down.rc == 0 and not path.exists(), down
        pids = [part["pid"] for part in record["parts"]]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)  # what has the pids now is not ended
    finally:
        for part in record["parts"]:  # their folder was deleted, so nobody finds them
            os.kill(part["pid"], signal.SIGTERM)
