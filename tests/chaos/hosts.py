"""A cluster with two slots on one host, and the driver on another one. The network between them can be cut."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil

from tests.chaos.arena import ClusterUp
from tests.servers.netns import Network, why_not

CUT_S = 30.0  # shorter than failure.lost_after_s
_START_S = 60.0

__all__ = ["CUT_S", "Hosts", "why_not"]


class Hosts:
    """The two hosts of a case. close() ends everything on them."""

    def __init__(self, folder: Path) -> None:
        self._network = Network(folder / "net").__enter__()
        self._desk, self._node = self._network.add("desk"), self._network.add("node")
        module = (sys.executable, "-P", "-m")
        here = str(folder / "net")
        self._node.start(
            *module, "ddptrain.clusters.scheduler.scheduler_process", "--folder", here, "--host", self._node.address
        )
        card = folder / "net" / "scheduler.json"
        deadline = time.monotonic() + _START_S
        while not card.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        address = str(json.loads(card.read_text())["address"])
        options = ["--slots", "2", "--gpus", "none", "--host", self._node.address, "--scratch", f"{here}/scratch"]
        self._node.start(*module, "ddptrain.worker", "--scheduler", address, *options)
        self.cluster = ClusterUp(address, self._pid("ddptrain.worker"), self._pid("scheduler"), folder / "net/scratch")

    def driver(self, folder: Path) -> tuple[str, ...]:
        """The prefix of the driver's command."""
        return self._desk.enter(folder)

    def cut(self) -> None:
        """Cut the network between the hosts for CUT_S: packets are lost, no connection is closed."""
        self._network.cut(self._desk)
        time.sleep(CUT_S)
        self._network.join(self._desk)

    def close(self) -> None:
        """End all processes and namespaces."""
        self._network.__exit__(None, None, None)

    def _pid(self, module: str) -> int:
        """The process of a module on the node."""
        deadline = time.monotonic() + _START_S
        while not (found := [pid for pid, words in self._node.processes().items() if module in words]):
            assert time.monotonic() < deadline, f"{module} does not run: {self._node.log.read_text()}"
            time.sleep(0.05)
        return min(found, key=lambda pid: psutil.Process(pid).create_time())
