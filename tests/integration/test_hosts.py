"""Several hosts, really: scheduler, workers and driver each on a host of their own, with cables that can be cut."""

from __future__ import annotations

import psutil
import pytest

from ddptrain.clusters.security import make_tls
from tests.conftest import Cli
from tests.integration import netns
from tests.integration.netns import Host, Network

pytestmark = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())

CUT_S = 20.0  # from a cut cable to the command's end
ALONE_S = 45.0  # from a cut cable to the end of everything on the host that was cut off
LINES = 20_000

WORKLOAD = f"""
import itertools, json, os, time
import psutil, torch
import torch.distributed as dist


def talk(ctx):
    for number in range({LINES}):
        print(f"{{number:06d}} of rank {{ctx.rank}}")
    total = torch.full((1 << 18,), float(ctx.rank + 1))
    dist.all_reduce(total)
    links = [link for link in psutil.Process().net_connections("tcp") if link.status == "ESTABLISHED"]
    told = {{
        "total": total.unique().tolist(),
        "links": sorted({{(link.laddr.ip, link.raddr.ip) for link in links}}),
        "ranks": {{name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}},
        "hostname": os.uname().nodename,
    }}
    ctx.save_file(f"rank-{{ctx.rank}}.json", json.dumps(told))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000))
    model(torch.ones(4, 1000)).mean().backward()
    ctx.checkpoint(model=model, step=1, metrics={{"val/loss": 1.0}})


def chat(ctx):
    line = "x" * 99
    total = torch.ones(1000)
    print("under way", flush=True)
    for step in itertools.count():
        for _ in range(2000): print(line)
        dist.all_reduce(total)
        total /= ctx.world_size


def large(ctx):
    model = torch.nn.Linear(10000, 10000)
    ctx.checkpoint(model=model, step=1)
    print("under way", flush=True)
    hold(ctx)


def hold(ctx):
    total = torch.ones(1000)
    for step in itertools.count():
        dist.all_reduce(total)
        total /= ctx.world_size
        if step == 3:
            print("under way", flush=True)
        time.sleep(0.02)
"""


class Cluster:
    """A scheduler on one host, workers with two slots on others, and the command on a host that has none of it."""

    def __init__(self, network: Network, cli: Cli) -> None:
        self.network, self.cli = network, cli
        self.site, self.home, self.scratch = (cli.folder / name for name in ("site", "home", "scratch"))
        self.head, self.desk = network.add("head", self.home), network.add("desk", self.scratch)
        self.site.mkdir()
        (self.site / "work.py").write_text(WORKLOAD)
        (self.home / "me").mkdir()
        self.workers: dict[Host, psutil.Process] = {}

    def start(self, *, tls: bool = False) -> None:
        if tls:
            make_tls(self.site)
        self.options = ["--cluster", ""]
