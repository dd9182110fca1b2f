"""Several hosts, really: scheduler, workers and driver each on a host of their own, with cables that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from tests.conftest import PATIENCE_S, Cli, Running
from tests.servers import netns
from tests.servers.dask_cluster import write_tls
from tests.servers.netns import Host, Network

pytestmark = [
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    pytest.mark.slow,
]

LOST_AFTER_S = 12.0  # of a run; that of the cluster, to which it attaches, stays at 60 s
CUT_S = 100.0  # from a cut cable to the word of it, at most
STEPS = 40
ALONE_S = 200.0  # from a cut cable to the end of everything on the host that was cut off, at most
LINES = 5_000

WORKLOAD = f"""
import itertools, json, os, time
import psutil, torch
import torch.distributed as dist
from safetensors.torch import save


def talk(ctx):
    for number in range({LINES}):
        print(f"{{number:06d}} of rank {{ctx.rank}}")
    total = torch.full((1 << 18,), float(ctx.rank + 1))
    dist.all_reduce(total)
    links = [link for link in psutil.Process().net_connections("tcp") if link.status == "ESTABLISHED"]
    told = {{
        "total": total.unique().tolist(),
        "links": sorted({{(link.laddr.ip, link.raddr.ip) for link in links}}),
        "ranks": [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")],
        "hostname": os.uname().nodename,
    }}
    ctx.save_file(f"rank-{{ctx.rank}}.json", json.dumps(told))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000))
    model(torch.ones(4, 1000)).mean().backward()
    ctx.checkpoint(model=model, step=1, metrics={{"val/loss": 1.0}})


def steady(ctx):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    until = time.monotonic() + float(os.environ["CUT_S"]) + 10.0
    for step in range(1, {STEPS} + 1):
        optimizer.zero_grad()
        model(torch.rand(4, 100)).mean().backward()
        optimizer.step()
        if ctx.rank == 0:
            ctx.log({{"loss": 1.0}}, step=step)
        ctx.checkpoint(model=model, optimizer=optimizer, step=step, metrics={{}})
        if step == 3:
            print("under way", flush=True)
        time.sleep(max(0.0, until - time.monotonic()) / ({STEPS} + 1 - step))
    ctx.save_file(f"weights-{{ctx.rank}}.safetensors", save(model.module.state_dict()))


def hold(ctx):
    total = torch.ones(1000)
    for step in itertools.count():
        dist.all_reduce(total)
        total /= ctx.world_size
        if step == 3:
            print("under way", flush=True)
        time.sleep(0.2)  # four ranks are up for a minute
"""


class Cluster:
    """A scheduler, two workers with two slots each, and the command, each on a host of its own.

    The workers do not see the run directory, and nobody sees what they write.
    """

    def __init__(self, network: Network, cli: Cli) -> None:
        self.network, self.cli = network, cli
        self.site, self.home, self.scratch = (cli.folder / name for name in ("site", "home", "scratch"))
        for folder in (self.site, self.home):
            folder.mkdir()
        (self.site / "work.py").write_text(WORKLOAD)
        self.head, self.desk = network.add("head"), network.add("desk")
        self.workers = [network.add(name, self.home, self.scratch) for name in ("w1", "w2")]
        write_tls(self.site)
        self._python(
            self.head,
            "ddptrain.clusters.scheduler.scheduler_process",
            "--folder",
            str(self.site),
            "--host",
            self.head.address,
        )
        self.until((self.site / "scheduler.json").exists, "the scheduler")
        self.address = str(json.loads((self.site / "scheduler.json").read_text())["address"])
        for host in self.workers:
            options = ["--slots", "2", "--gpus", "none", "--host", host.address, "--scratch", str(self.scratch)]
            options += ["--tls-dir", str(self.site)]
            self._python(host, "ddptrain.worker", "--scheduler", self.address, *options)

    def _python(self, host: Host, module: str, *words: str) -> None:
        host.start(sys.executable, "-P", "-m", module, *words)

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> float:
        """Wait for a condition; the seconds that it took, less those that the machine stood still."""
        waited_s, looked_at = 0.0, time.monotonic()
        while not condition():
            assert waited_s < timeout_s, f"{what} took over {timeout_s} s\n{self._said()}"
            time.sleep(0.05)
            waited_s += min(1.0, time.monotonic() - looked_at)
            looked_at = time.monotonic()
        return waited_s

    def _said(self) -> str:
        logs = [host.log for host in self.network.hosts.values() if host.log.exists()]
        return "\n".join(log.read_text(errors="replace")[-800:] for log in logs)

    def train(
        self, workload: str, run_id: str = "it", env: Mapping[str, str] | None = None, **failure: float
    ) -> Running:
        cluster = {"address": self.address, "ranks": 4}
        content = {
            "workload": f"work:{workload}",
            "cluster": cluster,
            "failure": {"grace_s": 1.0, **failure},
            "env": dict(env or {}),
        }
        config = self.site / f"{workload}.yaml"
        config.write_text(json.dumps({**content, "results": {"dir": str(self.home / "runs")}}))
        tls = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": str(self.site / file) for name, file in _TLS.items()}
        program = [*self.desk.enter(self.site), sys.executable, "-m", "ddptrain"]
        return self.cli.start("train", config, "--run-id", run_id, program=program, env=tls)

    def record(self, run_id: str = "it") -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.home / "runs" / run_id / "run.json").read_text())
        return record

    def ranks(self, host: Host) -> list[str]:
        """The processes that have to do with ranks, beside the rank server."""
        names = set()
        for pid in host.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                names.add(psutil.Process(pid).name())
        return sorted(name for name in names if name.startswith(("ddptrain-rank-", "ddptrain-store")))


_TLS = {"CA_FILE": "cert.pem", "CLIENT__CERT": "cert.pem", "CLIENT__KEY": "key.pem"}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path / "net") as made:
        yield made


def test_gang_of_two_hosts_talks_over_the_cable_and_a_host_that_dies_is_told(network: Network, run_cli: Cli) -> None:
    cluster = Cluster(network, run_cli)
    ended = cluster.train("talk").finish()
    assert ended.rc == 0, ended.stderr
    root = cluster.home / "runs" / "it"
    told = [json.loads((root / "artifacts" / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["ranks"] for rank in told] == [["0", "2", "0"], ["1", "2", "0"], ["0", "2", "1"], ["1", "2", "1"]]
    assert [rank["total"] for rank in told] == [[10.0]] * 4
    hosts = [rank["hostname"] for rank in told]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3] and set(hosts) == {"w1", "w2"}
    addresses = {host.address for host in cluster.workers}
    assert all(any(set(link) == addresses for link in rank["links"]) for rank in told), "the ranks met elsewhere"
    placed = [
        (rank["node_rank"], rank["local_rank"], rank["host"]) for rank in cluster.record()["attempts"][0]["ranks"]
    ]
    assert placed == [(0, 0, hosts[0]), (0, 1, hosts[1]), (1, 0, hosts[2]), (1, 1, hosts[3])]
    for rank in range(4):
        lines = (root / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert [line for line in lines if " of rank " in line] == [f"{n:06d} of rank {rank}" for n in range(LINES)]
    assert set(load_file(root / "checkpoints" / "step-1" / "model.safetensors")) == {"weight", "bias"}
    assert not cluster.scratch.exists() or os.listdir(cluster.scratch) == []
    cluster.until(lambda: not any(cluster.ranks(host) for host in cluster.workers), "the end of the ranks")
    host_that_dies_is_told_with_its_name(cluster)


def host_that_dies_is_told_with_its_name(cluster: Cluster) -> None:
    running = cluster.train("hold", "dying")
    running.wait_for("[rank 3] under way")
    dying = cluster.workers[1]
    for pid in dying.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with the one before
            psutil.Process(pid).kill()
    ended = running.finish()
    assert ended.rc == 4, ended.stderr
    assert f"{dying.name} ({dying.address})" in cluster.record("dying")["failure"]["message"]


def cut_cable_of_a_host_is_told_with_its_name_and_all_ends(network: Network, cluster: Cluster) -> None:
    running = cluster.train("hold", "cut", lost_after_s=LOST_AFTER_S)
    running.wait_for("[rank 3] under way")
    there, cut = sorted(cluster.workers, key=lambda host: host.name)
    network.cut(cut)
    cluster.until(lambda: f"{cut.name} ({cut.address})" in running.stderr, "the word of the cut cable", CUT_S)
    ended = running.finish()
    assert ended.rc == 4, ended.stderr
    failure = cluster.record("cut")["failure"]
    assert failure["kind"] == "worker_lost" and cut.name in failure["message"]
    cluster.until(lambda: not cluster.ranks(there), "the end of the ranks on the other host")
    cluster.until(lambda: not cut.processes(), "the end of everything on the host that was cut off", ALONE_S)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("whose", ["driver", "scheduler"])
def test_cut_between_driver_and_workers_that_is_shorter_than_the_limit_is_survived(
    network: Network, run_cli: Cli, whose: str
) -> None:
    """The ranks still reach each other. What they log and save meanwhile arrives once the network is back."""
    cut_s = 20.0
    cluster = Cluster(network, run_cli)
    running = cluster.train("steady", env={"CUT_S": str(cut_s)}, lost_after_s=60.0)
    running.wait_for("[rank 0] under way")
    host = cluster.desk if whose == "driver" else cluster.head
    network.cut(host)
    time.sleep(cut_s)
    assert running.popen.poll() is None, running.stderr
    network.join(host)
    ended = running.finish()
    assert ended.rc == 0, ended.stderr
    root = cluster.home / "runs" / "it"
    steps = [json.loads(line)["step"] for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    weights = [load_file(root / "checkpoints" / f"step-{STEPS}" / "model.safetensors")["weight"]]
    weights += [load_file(root / "artifacts" / f"weights-{rank}.safetensors")["weight"] for rank in range(4)]
    assert all((other == weights[0]).all() for other in weights)
    assert len(cluster.record()["attempts"]) == 1
    cluster.until(lambda: not any(cluster.ranks(host) for host in cluster.workers), "the end of the ranks")


@pytest.mark.timeout(900)
def test_cut_cable_of_the_driver_frees_the_slots_and_that_of_a_host_ends_all(network: Network, run_cli: Cli) -> None:
    cluster = Cluster(network, run_cli)
    running = cluster.train("hold", lost_after_s=LOST_AFTER_S)
    running.wait_for("[rank 3] under way")
    network.cut(cluster.desk)
    ended = running.finish(CUT_S)
    assert ended.rc == 4, ended.stderr
    cluster.until(lambda: not any(cluster.ranks(host) for host in cluster.workers), "the end of the ranks", ALONE_S)
    network.join(cluster.desk)
    ended = cluster.train("talk", "free").finish()
    assert ended.rc == 0, ended.stderr  # all four slots are free
    cut_cable_of_a_host_is_told_with_its_name_and_all_ends(network, cluster)
