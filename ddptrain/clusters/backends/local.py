"""Clusters on this machine: a scheduler and one worker, detached.

They listen on unix sockets that only this user can open; with --tls on 127.0.0.1, for programs that need a TCP address.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ddptrain.clusters import processes
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.processes import DaemonId, DaemonOrder
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.scheduler.scheduler_process import SCHEDULER_FILE
from ddptrain.clusters.status import client_of
from ddptrain.config.sections.clusters import slots_to_order
from ddptrain.errors import ClusterError
from ddptrain.gpus import default_slots, visible_gpus

_LOOPBACK = "127.0.0.1"
_SCHEDULER, _WORKER = "scheduler", "worker"


class LocalProvider:
    """One slot per GPU of this machine, or the requested number of slots on the CPU."""

    tls = False  # other users can't open its unix sockets

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Start scheduler and worker, or change how many slots the worker offers. Raises ClusterError."""
        count, gpus = _room(cluster.record.settings, slots)
        running = {name for name, daemon in _daemons(cluster).items() if processes.alive(daemon)}
        if _WORKER in running:
            from ddptrain.worker import driver_calls

            with client_of(cluster) as client:
                client.run(driver_calls.set_slots, count)
            return
        cluster.update(workers=1)
        # The worker first: its rank server imports torch while the scheduler starts.
        _start(cluster, _WORKER, _worker_arguments(cluster, count, gpus))
        if not cluster.record.address:
            _start(cluster, _SCHEDULER, _scheduler_arguments(cluster))

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """Return the logs of scheduler and worker; a worker logs only what goes wrong."""
        return {_source(name): processes.tail(str(cluster.folder), name, lines) for name in (_SCHEDULER, _WORKER)}

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """End both, and the ranks with them. Raises ClusterError."""
        processes.stop(_daemons(cluster).values())
        if cluster.record.address.startswith("unix://"):
            from ddptrain.protocol.unix_comm import remove_socket_dir

            remove_socket_dir(cluster.record.address)  # left by a scheduler that was killed

    def fault(self, cluster: Deployment) -> str | None:
        """Return the name of the process that has ended, or None."""
        for name, daemon in _daemons(cluster).items():
            if not processes.alive(daemon):
                return f"the {name} (pid {daemon.pid}) has ended"
        return None


def _worker_arguments(cluster: Deployment, slots: int, gpus: Sequence[str]) -> list[str]:
    arguments = ["-m", "ddptrain.worker", "--scheduler-file", str(cluster.folder / SCHEDULER_FILE)]
    arguments += ["--slots", str(slots), "--gpus", ",".join(gpus) or "none"]
    arguments += ["--scratch", str(cluster.folder / "scratch"), "--name", socket.gethostname()]
    return (
        arguments if cluster.tls_dir is None else [*arguments, "--host", _LOOPBACK, "--tls-dir", str(cluster.tls_dir)]
    )


def _scheduler_arguments(cluster: Deployment) -> list[str]:
    arguments = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(cluster.folder)]
    return [*arguments, "--idle-timeout", str(cluster.record.idle_timeout_s), "--warm-driver"]


def _start(cluster: Deployment, name: str, arguments: list[str]) -> None:
    order = DaemonOrder(name=name, folder=str(cluster.folder), files={}, argv=arguments, env={})
    started = dataclasses.asdict(processes.start(order))
    cluster.update(parts={**cluster.record.parts, name: started})


def _room(settings: Mapping[str, Any], slots: int | None) -> tuple[int, tuple[str, ...]]:
    """Return the number of slots of the worker, and its GPUs. Raises ClusterError if this machine has fewer GPUs."""
    present = () if settings["gpus"] == 0 else visible_gpus(os.environ)
    wanted = len(present) if settings["gpus"] == "auto" else int(settings["gpus"])
    if wanted > len(present):
        raise ClusterError(
            f"cluster.gpus is {wanted}, but this machine has {len(present)}: set it to auto, or to 0 for the CPU"
        )
    gpus = present[:wanted]
    asked = slots_to_order(settings["ranks"], slots)
    if slots is None and isinstance(settings["ranks"], Mapping) and gpus:
        asked = max(settings["ranks"]["min"], min(settings["ranks"]["max"], len(gpus)))
    count = default_slots(gpus) if asked is None else asked
    if gpus and count > len(gpus):
        raise ClusterError(
            f"{count} slots are asked for, but there are {len(gpus)} GPUs, one a slot: ask for fewer, or set "
            "cluster.gpus to 0 for slots on the CPU"
        )
    return count, gpus


def _source(name: str) -> str:
    return name if name == _SCHEDULER else f"{name} {socket.gethostname()}"


def _daemons(cluster: Deployment) -> dict[str, DaemonId]:
    return {name: DaemonId.of(part) for name, part in cluster.record.parts.items()}
