"""Two hosts with different packages train with those of the project, which uv installs once on each host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli, Finished
from tests.servers import netns
from tests.servers.netns import Network
from tests.support.command import wait_until
from tests.support.environments import UV, lock_project, make_environment, make_wheel

pytestmark = [pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()), pytest.mark.slow]

TRAIN = """
import os
import torch.distributed as dist
import wordlib


def train(ctx):
    found = [None] * ctx.world_size
    dist.all_gather_object(found, (wordlib.VERSION, os.uname().nodename, wordlib.__file__))
    if ctx.rank == 0:
        print("says", sorted(found), flush=True)
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path / "net") as made:
        yield made


def test_hosts_with_different_packages_train_with_those_of_the_lock(
    network: Network, run_cli: Cli, tmp_path: Path
) -> None:
    project, scheduler, cache = tmp_path / "project", tmp_path / "scheduler.json", tmp_path / "cache"
    project.mkdir()
    head, desk = network.add("head"), network.add("desk")
    hosts = [network.add(name, cache, tmp_path / "scratch") for name in ("w1", "w2")]
    command = ("-P", "-m", "distributed.cli.dask_scheduler", "--host", head.address, "--no-dashboard")
    python = [
        make_environment(tmp_path / name, versions=other)
        for name, other in (("desk-env", {}), ("w1-env", {"torch": "2.0.0"}), ("w2-env", {"wordlib": "0.1"}))
    ]
    head.start(str(python[0]), *command, "--scheduler-file", str(scheduler))
    wait_until(scheduler.exists, "the scheduler")
    address = json.loads(scheduler.read_text())["address"]
    path = {"PATH": f"{Path(UV).parent}:/usr/bin:/bin:/usr/sbin:/sbin", "XDG_CACHE_HOME": str(cache)}
    for host, own in zip(hosts, python[1:], strict=True):
        options = ("--slots", "2", "--gpus", "none", "--host", host.address, "--scratch", str(tmp_path / "scratch"))
        host.start(str(own), "-P", "-m", "ddptrain.worker", "--scheduler", address, *options, env=path)
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "wordlib", version, f"VERSION = {version!r}\n")
    lock_project(project, tmp_path / "wheels", "wordlib>1")
    (project / "train.py").write_text(TRAIN)

    def train(**code: str) -> Finished:
        config = {"workload": "train:train", "cluster": {"ranks": 4}, "code": code}
        (project / "c.yaml").write_text(json.dumps(config))
        program = [*desk.enter(project), str(python[0]), "-m", "ddptrain"]
        return run_cli("train", project / "c.yaml", "--cluster", address, program=program)

    without = train()
    assert without.rc == 4 and "2.0.0 !" in without.stderr
    first = train(environment="uv")
    assert first.rc == 0, first.stderr + hosts[0].log.read_text()
    said = next(line for line in first.stdout.splitlines() if "says" in line)
    assert said.count("'2.0', 'w1'") == said.count("'2.0', 'w2'") == 2 and str(cache) in said
    assert "installing the environment of" in first.stderr and "on host w1, w2" in first.stderr
    again = train(environment="uv")
    assert again.rc == 0 and "installing" not in again.stderr
    (project / "pyproject.toml").write_text((project / "pyproject.toml").read_text().replace("wordlib>1", "wordlib<1"))
    stale = train(environment="uv")
    assert stale.rc == 2 and "uv lock" in stale.stderr
