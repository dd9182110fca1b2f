"""ddptrain cluster check, on this machine and on hosts of which one has a slow network."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S, Cli
from tests.integration import netns

WORKLOAD = """
def tell(ctx):
    print("hosts", ctx.world_size)
"""


def test_this_machine_is_checked(run_cli: Cli) -> None:
    done = run_cli("cluster", "check", "--json")
    told = json.loads(done.stdout)
    assert done.rc == (0 if told["usable"] else 4), done
    (host,) = told["hosts"]
    assert host["facts"]["versions"]["torch"] and host["facts"]["scratch_write_mb_s"] > 0
    assert all(rank["gflops"] > 0 and rank["error"] == "" for rank in host["ranks"])
    assert [path.name for path in run_cli.folder.glob(".ddptrain-check-*")] == []


@pytest.mark.slow
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed (iproute2)")
def test_slow_host_is_named_and_left_out(run_cli: Cli, tmp_path: Path) -> None:
    (run_cli.folder / "work.py").write_text(WORKLOAD)
    python = (sys.executable, "-P", "-m")
    with netns.Network(tmp_path / "net") as network:
        one, two = (network.add(name, tmp_path / "scratch") for name in ("one", "two"))
        two.run(
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "64kb", "latency", "50ms"
        )
        network_folder = str(tmp_path)
        one.start(
            *python, "ddptrain.clusters.scheduler.scheduler_process", "--folder", network_folder, "--host", one.address
        )
        card = tmp_path / "scheduler.json"
        deadline = time.monotonic() + PATIENCE_S
        while not card.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        address = str(json.loads(card.read_text())["address"])
        for host in (one, two):
            options = ["--slots", "1", "--gpus", "none", "--host", host.address, "--scratch", str(tmp_path / "scratch")]
            host.start(*python, "ddptrain.worker", "--scheduler", address, *options)
        program = [*one.enter(run_cli.folder), sys.executable, "-m", "ddptrain"]
        config = {
            "workload": "work:tell",
            "cluster": {"address": address, "ranks": {"min": 1, "max": 2}, "check": "quick", "exclude_bad": True},
            "failure": {"rejoin_wait_s": PATIENCE_S},  # until both workers have joined
        }
        (run_cli.folder / "tell.yaml").write_text(json.dumps(config))

        trained = run_cli("train", "tell.yaml", program=program)
        assert trained.rc == 0, trained
        assert "this run does not use two (10.83.0.2)" in trained.stdout + trained.stderr
        assert "[rank 0] hosts 1" in trained.stdout, trained

        checked = run_cli("cluster", "check", address, "--json", program=program)
        assert checked.rc == 4, checked
        told = json.loads(checked.stdout)
        (pair,) = told["pairs"]
        assert {pair["first"], pair["second"]} == {one.address, two.address}
        assert 0 < pair["gb_s"] < 0.01
        found = [each for each in told["findings"] if each["level"] == "bad"]
        assert [(each["subject"], each["host"], each["other"]) for each in found] == [
            ("network", pair["first"], pair["second"])
        ]
