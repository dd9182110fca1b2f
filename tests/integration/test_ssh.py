"""The backend ssh, with a real OpenSSH server and two hosts on loopback."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import PATIENCE_S, Cli, Finished
from tests.integration.test_security import attacked, listening_ports, marker
from tests.servers import netns
from tests.servers.sshd import SshHosts, ssh_hosts, ssh_network

__all__ = ["marker"]  # a fixture

WORKLOAD = """
import os
import torch
import torch.distributed as dist


def tell(ctx):
    total = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(total)
    print("node", ctx.node_rank, "local", ctx.local_rank, "of", ctx.local_world_size, "sum", int(total))
    print("value", os.environ.get("MY_VALUE"))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    ctx.checkpoint(model=model, step=1, epoch=1, metrics={"val/loss": 1.0})
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh") / "sshd") as found:
        yield found


def cluster(cli: Cli, *args: str, rc: int = 0) -> Finished:
    done = cli.look(*args) if args[0] == "status" else cli("cluster", *args)
    assert done.rc == rc, done
    return done


def view(cli: Cli, *args: str) -> dict[str, Any]:
    """What a command tells of the cluster."""
    told: dict[str, Any] = json.loads(cluster(cli, *args, "--json").stdout)
    return told


def remote_folders(hosts: SshHosts) -> list[Path]:
    folder = hosts.state / "ddptrain" / "hosts"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cluster_on_two_hosts_trains_and_leaves_nothing(run_cli: Cli, hosts: SshHosts, marker: Path) -> None:
    """All in one, for each worker takes seconds to start."""
    config = run_cli.folder / "ssh_config"
    config.write_text(hosts.config.read_text())
    more = ["--set", "cluster.ssh.ranks_per_host=2"]
    more += ["--set", f"cluster.ssh.options=[-F, {config}]"]
    up = view(run_cli, "up", "--name", "dev", *hosts.settings, *more)
    assert up["address"].startswith("tls://127.0.0.1:") and up["slots"] == 4
    assert sorted(up["hosts"]) == ["127.0.0.1", "127.0.0.2"]
    private = [path for folder in remote_folders(hosts) for path in (folder, *folder.glob("*.pem"))]
    assert len(private) == 3 * 3 and all(path.stat().st_mode & 0o077 == 0 for path in private)

    process_without_the_certificate_runs_nothing(up, marker)
    (run_cli.folder / "work.py").write_text(WORKLOAD)
    (run_cli.folder / "tell.yaml").write_text(
        json.dumps({"workload": "work:tell", "cluster": {"name": "dev"}, "env": {"MY_VALUE": "there"}})
    )
    trained = run_cli("train", "tell.yaml")
    assert trained.rc == 0, trained.stderr
    for rank in range(4):
        assert f"[rank {rank}] node {rank // 2} local {rank % 2} of 2 sum 10" in trained.stdout
        assert f"[rank {rank}] value there" in trained.stdout

    said = json.loads(cluster(run_cli, "logs", "dev", "--json").stdout)
    assert sorted(said) == ["scheduler", "worker alpha", "worker beta"]

    (pid,) = (part["pid"] for part in up["parts"] if (part["role"], part["host"]) == ("worker", "beta"))
    host_that_is_gone_is_named_by_down_which_ends_the_others(run_cli, hosts, config, pid)
    cluster(run_cli, "down", "dev")
    assert remote_folders(hosts) == []


def process_without_the_certificate_runs_nothing(view: dict[str, Any], marker: Path) -> None:
    ports = listening_ports([psutil.Process(part["pid"]) for part in view["parts"]])
    assert len(ports) >= 3, "a scheduler and two workers"
    assert "answered" not in attacked(ports, marker, as_other_user=False)
    assert not marker.exists()


def host_that_is_gone_is_named_by_down_which_ends_the_others(cli: Cli, hosts: SshHosts, config: Path, pid: int) -> None:
    config.write_text(hosts.config.read_text().replace("127.0.0.2", "127.0.0.99"))
    done = cluster(cli, "down", "dev", rc=4)
    assert "beta: ssh can't connect: " in done.stderr
    assert f"the worker beta (pid {pid}) may still run there" in done.stderr
    assert len(remote_folders(hosts)) == 1
    config.write_text(hosts.config.read_text())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())
def test_hosts_of_a_network_are_reached_by_names_that_are_loopback_to_themselves(run_cli: Cli, tmp_path: Path) -> None:
    state = tmp_path / "state"  # each host has its own there
    with netns.Network(tmp_path / "net") as network:
        desk, one, two = network.add("desk"), network.add("one", state), network.add("two", state)
        with (desk.folder / "hosts").open("a") as names:
            names.write(f"{one.address} one\n{two.address} two\n")
        hosts = ssh_network(tmp_path / "sshd", (one, two), state)
        idle = len(one.processes())
        command = (*desk.enter(tmp_path), sys.executable, "-m", "ddptrain")
        up = run_cli("cluster", "up", "--name", "dev", *hosts.settings, "--ranks", "4", program=command)
        assert up.rc == 0, up.stderr
        assert f"tls://{one.address}:" in up.stdout
        (tmp_path / "work.py").write_text(WORKLOAD)
        (tmp_path / "tell.yaml").write_text(
            json.dumps({"workload": "work:tell", "cluster": {"name": "dev"}, "env": {"MY_VALUE": "there"}})
        )
        trained = run_cli("train", "tell.yaml", program=command)
        assert trained.rc == 0, trained.stderr
        for rank in range(4):
            assert f"[rank {rank}] node {rank // 2} local {rank % 2} of 2 sum 10" in trained.stdout
        two.run("mount", "-t", "tmpfs", "-o", "size=64m", "none", "/dev/shm")  # as Docker's default
        checked = run_cli("doctor", "--cluster", "dev", "--json", program=command)
        bad = {
            (check["host"], check["subject"])
            for check in json.loads(checked.stdout)["checks"]
            if check["result"] == "bad"
        }
        assert (two.name, "shm") in bad and (one.name, "shm") not in bad, checked
        assert checked.rc == 4
        down = run_cli("cluster", "down", "dev", program=command)
        assert down.rc == 0, down.stderr
        for host in (one, two):
            assert host.run("find", str(state / "ddptrain" / "hosts"), "-mindepth", "1") == ""
            deadline = time.monotonic() + PATIENCE_S  # the ssh servers' processes for us end after ours
            while len(host.processes()) > idle:
                assert time.monotonic() < deadline, host.processes()
                time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_start_that_is_killed_at_any_moment_is_cleared_away_by_down(run_cli: Cli, hosts: SshHosts) -> None:
    moment = random.Random(32)
    for after_s in (0.0, *(moment.uniform(0.0, 4.0) for _ in range(7))):
        up = run_cli.start("cluster", "up", "--name", "dev", *hosts.settings, "--ranks", "2")
        deadline = time.monotonic() + PATIENCE_S
        while not remote_folders(hosts):
            assert time.monotonic() < deadline and up.popen.poll() is None, up.stderr
            time.sleep(0.002)
        time.sleep(after_s)
        up.kill_group()  # first, while the host starts the scheduler, and nobody knows its process
        folders = {str(folder) for folder in remote_folders(hosts)}
        there = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] in folders]
        cluster(run_cli, "down", "dev")
        assert remote_folders(hosts) == [], f"killed after {after_s} s"
        while left := [each for each in there if each.is_running()]:  # until its parent on the host ends
            assert time.monotonic() < deadline, f"killed after {after_s} s: {left}"
            time.sleep(0.05)


@pytest.mark.long
def test_yaml_with_hosts_gets_a_cluster_for_its_run(run_cli: Cli, hosts: SshHosts) -> None:
    (run_cli.folder / "work.py").write_text(WORKLOAD)
    ssh = {
        "hosts": ["alpha", "beta"],
        "ranks_per_host": 1,
        "python": sys.executable,
        "options": ["-F", str(hosts.config)],
    }
    config = run_cli.folder / "tell.yaml"
    config.write_text(json.dumps({"workload": "work:tell", "cluster": {"ssh": ssh}}))
    trained = run_cli("train", config)
    assert trained.rc == 0, trained.stderr
    assert "[rank 1] node 1 local 0 of 1 sum 3" in trained.stdout
    assert remote_folders(hosts) == []
    assert json.loads(cluster(run_cli, "status", "--json").stdout) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--set", "cluster.ssh.python=/nowhere/python"], "there is no /nowhere/python there"),
        pytest.param(
            ["--set", "cluster.ssh.python=python3"],
            "ddptrain is missing there: python3 -m pip install ddptrain==",
            marks=pytest.mark.long,
        ),
        (["--host", "nowhere.invalid"], "nowhere.invalid: ssh can't connect: ssh: Could not resolve"),
        (["--host", "-oProxyCommand=true"], "is not a host: ssh would read it as an option"),
        (["--set", "cluster.ssh.ranks_per_host=1", "--ranks", "9"], "9 slots don't fit on 2 hosts with 1 each"),
    ],
)
def test_host_that_cannot_be_used_is_told_in_a_line(
    run_cli: Cli, hosts: SshHosts, change: list[str], told: str
) -> None:
    done = run_cli("cluster", "up", "--name", "dev", *hosts.settings, *change)
    if "python3" in str(change) and done.rc == 0:
        cluster(run_cli, "down", "dev")
        pytest.skip("the system's Python has ddptrain")
    assert done.rc in (2, 4), done
    errors = [line for line in done.stderr.splitlines() if told in line]
    assert errors and len(errors) <= 2, done.stderr  # a line a host
    assert remote_folders(hosts) == []
    assert json.loads(cluster(run_cli, "status", "--json").stdout) == []


@pytest.mark.long
def test_wrong_key_is_refused_by_the_host_and_told(run_cli: Cli, hosts: SshHosts) -> None:
    other = run_cli.folder / "other"
    other.write_text(hosts.config.read_text().replace("user_key", "host_key"))
    change = ["--set", f"cluster.ssh.options=[-F, {other}]"]
    done = cluster(run_cli, "up", "--name", "dev", *hosts.settings, *change, rc=4)
    assert "alpha: ssh can't connect:" in done.stderr and "Permission denied" in done.stderr
