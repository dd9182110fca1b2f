"""Clusters on this machine: a scheduler and one worker, detached.

They listen on 127.0.0.1, with TLS: only this user can read the cluster's key.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Mapping

from ddptrain.clusters import processes
from ddptrain.clusters.processes import PYTHON
from ddptrain.clusters.provider import Backend, Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.config.sections.clusters import ClusterConfig, RankRange
from ddptrain.errors import ClusterError
from ddptrain.gpus import default_slots, visible_gpus

_LOOPBACK = "127.0.0.1"


class LocalBackend(Backend):
    """One slot per GPU of this machine, or the requested number of slots on the CPU."""

    own_workers = True
    tls = True

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Start scheduler and worker. Raises ClusterError."""
        slots, gpus = _room(cluster.config)
        cluster.workers = 1
        folder = cluster.folder
        worker = ["-m", "ddptrain.worker", "--scheduler-file", f"{folder}/scheduler.json", "--slots", str(slots)]
        worker += ["--gpus", ",".join(gpus) or "none", "--scratch", f"{folder}/scratch", "--name", socket.gethostname()]
        worker += ["--host", _LOOPBACK, "--tls-dir", str(folder)]
        # The worker first: its rank server imports torch while the scheduler starts.
        yield _started(cluster, "worker", worker)
        scheduler = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(folder), "--warm-driver"]
        yield _started(cluster, "scheduler", [*scheduler, "--idle-timeout", str(cluster.config.idle_timeout_s)])

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return the name of the process that has ended, or None."""
        return processes.ended(cluster.parts)

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


def _room(config: ClusterConfig) -> tuple[int, tuple[str, ...]]:
    """Return the number of slots of the worker, and its GPUs. Raises ClusterError if this machine has fewer GPUs."""
    present = () if config.gpus == 0 else visible_gpus(os.environ)
    wanted = len(present) if config.gpus == "auto" else config.gpus
    if wanted > len(present):
        raise ClusterError(
            f"cluster.gpus is {wanted}, but this machine has {len(present)}: set it to auto, or to 0 for the CPU"
        )
    gpus = present[:wanted]
    count = config.slots or default_slots(gpus)
    if isinstance(config.ranks, RankRange) and gpus:
        count = max(config.ranks.min, min(config.ranks.max, len(gpus)))
    if gpus and count > len(gpus):
        raise ClusterError(
            f"{count} slots are asked for, but there are {len(gpus)} GPUs, one a slot: ask for fewer, or set "
            "cluster.gpus to 0 for slots on the CPU"
        )
    return count, gpus
