"""Clusters on this machine: a scheduler and one worker, detached.

They listen on 127.0.0.1, with TLS: only this user can read the cluster's key.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Mapping

from ddptrain.clusters import processes
from ddptrain.clusters.machine_slots import local_resources
from ddptrain.clusters.processes import PYTHON
from ddptrain.clusters.provider import Backend, Tell
from ddptrain.clusters.record import ClusterRecord, Part, ended

_LOOPBACK = "127.0.0.1"


class LocalBackend(Backend):
    """One slot per GPU of this machine, or the requested number of slots on the CPU."""

    own_workers = True
    tls = True

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Start scheduler and worker. Raises ClusterError."""
        room = local_resources(cluster.config, os.environ)
        cluster.workers = 1
        folder = cluster.folder
        worker = ["-m", "ddptrain.worker", "--scheduler-file", f"{folder}/scheduler.json", "--slots", str(room.ranks)]
        worker += ["--gpus", ",".join(room.gpus) or "none", "--scratch", f"{folder}/scratch"]
        worker += ["--name", socket.gethostname(), "--host", _LOOPBACK, "--tls-dir", str(folder)]
        # The worker first: its rank server imports torch while the scheduler starts.
        yield _started(cluster, "worker", worker)
        scheduler = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(folder), "--warm-driver"]
        yield _started(cluster, "scheduler", [*scheduler, "--idle-timeout", str(cluster.config.idle_timeout_s)])

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return the name of the process that has ended, or None."""
        return ended(cluster.parts)

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return the logs of scheduler and worker; a worker logs only what goes wrong."""
        parts = sorted(cluster.parts, key=lambda part: part.role)
        return {part.name: processes.tail(str(cluster.folder), part.role, lines) for part in parts}

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """End both, and the ranks with them. Raises ClusterError."""
        processes.end(str(cluster.folder))


def _started(cluster: ClusterRecord, role: str, arguments: list[str]) -> Part:
    folder = str(cluster.folder)
    pid = processes.start(folder, role, [PYTHON, "-P", *arguments])
    return Part(role=role, host=socket.gethostname(), id=folder, log=f"{folder}/{role}.log", pid=pid)
