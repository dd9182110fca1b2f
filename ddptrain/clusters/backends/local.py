"""Clusters on this machine: a scheduler and one worker, detached.

They listen on 127.0.0.1, with TLS: only this user can read the cluster's key.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass

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
        room = local_resources(cluster.config, os.environ)
        cluster.workers = 1
        folder = cluster.folder
        worker = ["-m", "ddptrain.worker", "--scheduler-file", f"{folder}/scheduler.json", "--slots", str(room.ranks)]
        worker += [
            "--gpus",
            ",".join(room.gpus) or "none",
            "--scratch",
            f"{folder}/scratch",
            "--name",
            socket.gethostname(),
        ]
        worker += ["--host", _LOOPBACK, "--tls-dir", str(folder)]
        # The worker first: its rank server imports torch while the scheduler starts.
        yield _started(cluster, "worker", worker)
        scheduler = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(folder), "--warm-driver"]
        yield _started(cluster, "scheduler", [*scheduler, "--idle-timeout", str(cluster.config.idle_timeout_s)])

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return the name of the process that has ended, or None."""
        return cluster.ended_process()

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


# --- the slots and GPUs of this machine; also for the embedded cluster of a run ---


@dataclass(frozen=True, slots=True)
class LocalResources:
    """The number of slots; `gpus` has an entry for CUDA_VISIBLE_DEVICES for each slot, none on the CPU."""

    ranks: int
    gpus: tuple[str, ...]


def local_resources(cluster: ClusterConfig, environ: Mapping[str, str]) -> LocalResources:
    """Return ranks and GPUs for a configuration. Raises ClusterError if there are fewer GPUs than it asks for."""
    present = () if cluster.gpus == 0 else visible_gpus(environ)
    wanted = len(present) if cluster.gpus == "auto" else int(cluster.gpus)
    if wanted > len(present):
        raise ClusterError(
            f"cluster.gpus is {wanted}, but this machine has {len(present)}: set it to auto, or to 0 for the CPU"
        )
    if isinstance(cluster.ranks, RankRange):
        ranks = max(cluster.ranks.min, min(cluster.ranks.max, wanted or cluster.ranks.max))
    else:
        ranks = cluster.slots or default_slots(present[:wanted])
    if wanted and ranks > wanted:
        raise ClusterError(
            f"cluster.ranks is {ranks}, but there are {wanted} GPUs, one a rank: ask for fewer ranks, or set "
            "cluster.gpus to 0 to train on the CPU"
        )
    return LocalResources(ranks, present[: min(ranks, wanted)])


def crowding(resources: LocalResources, cores: int) -> str:
    """Return a warning about more ranks on the CPU than the default and than cores, or ""."""
    most = max(default_slots(()), cores)
    if resources.gpus or resources.ranks <= most:
        return ""
    shared = "share 1 core" if cores == 1 else f"share {cores} cores"
    return f"{resources.ranks} ranks {shared}: their start and each step take longer; --ranks {most} may be faster"
