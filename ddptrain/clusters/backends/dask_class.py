"""Clusters of any `distributed.deploy.Cluster` class: LocalCluster, FargateCluster, Coiled, LSFCluster, ...

A detached process (dask_class_process.py) creates the cluster object and closes it at the end. The record of the
cluster and its log file name this process "keeper", also in earlier versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddptrain.clusters import processes
from ddptrain.clusters.backends.dask_class_process import ORDER_FILE, SOCKET_FILE, DaskClusterOrder
from ddptrain.clusters.backends.foreign_cluster import dask_logs, spare_runs
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.processes import DaemonId, DaemonOrder
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.scheduler.scheduler_process import SCHEDULER_FILE
from ddptrain.errors import ClusterError, UsageError

_PROCESS = "keeper"  # in records of clusters that run
_POLL_S = 0.05
_TELL_EVERY_S = 5.0  # seconds between progress messages: a user may want to interrupt the wait
_ORDER_S = 60.0  # some classes return from scale() only when all workers are there
_STOP_S = 60.0  # cloud machines take longer to end than a process
_LOG_LINES = 8
_LONGEST_PATH = 100  # of a socket, in bytes: the system's limit is 104 or 108


class DeployProvider:
    """Starts a process that creates an object of the configured class with the configured arguments."""

    tls = None  # the cluster class decides

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Start the process and wait for its cluster, or request other slots. Raises ClusterError, UsageError."""
        daemon = _process(cluster)
        if daemon is None:
            _start(cluster, slots)
            cluster.update(workers=_await_address(cluster, tell)["workers"])
        elif slots is not None:
            spare_runs(cluster, slots)
            cluster.update(workers=_order(cluster, daemon, slots)["workers"])

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """Return the log of the process, and the logs that Dask keeps of the scheduler and the workers."""
        return {"cluster": processes.tail(str(cluster.folder), _PROCESS, lines), **dask_logs(cluster, lines)}

    def fault(self, cluster: Deployment) -> str | None:
        """Return why the process has ended; None if it has not."""
        daemon = _process(cluster)
        if daemon is None or processes.alive(daemon):
            return None
        return _end_reason(cluster, daemon)

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """Make the process close its cluster, also one that still starts. Raises ClusterError if it is not closed."""
        daemon = _process(cluster)
        if daemon is None:
            return
        name = cluster.record.settings["class"]
        if processes.alive(daemon):
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGTERM)
            _await_end(cluster, daemon, tell)
        elif not cluster.ended:
            tell(
                f"the process that holds the cluster (pid {daemon.pid}) was killed: what {name} has "
                "started on other hosts may still run"
            )
        if cluster.ended.get("is_left"):
            cluster.update(parts={})  # a second `cluster down` has nothing left to end
            raise ClusterError(f"{cluster.ended['reason']}; ddptrain cluster down {cluster.name} deletes its record")


def _start(cluster: Deployment, slots: int | None) -> None:
    settings = cluster.record.settings
    ranks = settings["ranks"] if isinstance(settings["ranks"], int) else None
    order = DaskClusterOrder(
        settings["class"],
        settings["kwargs"],
        slots=slots if slots is not None else ranks,
        idle_timeout_s=cluster.record.idle_timeout_s,
        sys_path=[os.getcwd()],
    )
    arguments = ["-m", "ddptrain.clusters.backends.dask_class_process", "--folder", str(cluster.folder)]
    started = processes.start(
        DaemonOrder(_PROCESS, str(cluster.folder), arguments, files={ORDER_FILE: order.to_json()})
    )
    cluster.update(parts={_PROCESS: dataclasses.asdict(started)})


def _await_address(cluster: Deployment, tell: Tell) -> Mapping[str, Any]:
    """Return the content of scheduler.json, once the cluster is up. Raises ClusterError, UsageError if it fails."""
    daemon = _process(cluster)
    assert daemon is not None
    name, timeout_s = cluster.record.settings["class"], float(cluster.record.settings["start_timeout_s"])
    for waited_s in _waiting(tell, f"{name} is starting"):
        with contextlib.suppress(FileNotFoundError):
            card: dict[str, Any] = json.loads((cluster.folder / SCHEDULER_FILE).read_text(encoding="utf-8"))
            return card
        if not processes.alive(daemon):
            kind = UsageError if cluster.ended.get("is_usage") else ClusterError
            raise kind(_end_reason(cluster, daemon))
        if waited_s > timeout_s:
            raise ClusterError(f"{name} is not up after {timeout_s:g} s (cluster.start_timeout_s){_log_end(cluster)}")
    raise AssertionError("the wait has no end of its own")


def _await_end(cluster: Deployment, daemon: DaemonId, tell: Tell) -> None:
    is_up = bool(cluster.record.address)
    name = cluster.record.settings["class"]
    for waited_s in _waiting(tell, f"{name} is {'closing' if is_up else 'still starting, and is closed after that'}"):
        if not processes.alive(daemon):
            return
        if waited_s > _STOP_S:
            raise ClusterError(
                f"{name} is still {'closing' if is_up else 'being built'} after {_STOP_S:g} s: the process "
                f"that holds it (pid {daemon.pid}) will close it and end; "
                f"try again with ddptrain cluster down {cluster.name}"
            )


def _waiting(tell: Tell, text: str) -> Iterator[float]:
    """Yield the seconds waited so far, at each poll; show `text` every few seconds."""
    began = last_shown = time.monotonic()
    while True:
        now = time.monotonic()
        yield now - began
        if now - last_shown > _TELL_EVERY_S:
            tell(text)
            last_shown = now
        time.sleep(_POLL_S)


def _end_reason(cluster: Deployment, daemon: DaemonId) -> str:
    """Return one line that says why the process has ended, and the end of its log if the line is not enough."""
    ended = cluster.ended
    if ended.get("is_usage"):
        return str(ended["reason"])
    has_ended = f"the process that holds the cluster (pid {daemon.pid}) has ended"
    return str(ended.get("reason") or has_ended) + _log_end(cluster)


def _log_end(cluster: Deployment) -> str:
    log = processes.tail(str(cluster.folder), _PROCESS, _LOG_LINES)
    return "\nlast lines of its log:\n  " + log.strip().replace("\n", "\n  ") if log.strip() else ""


def _order(cluster: Deployment, daemon: DaemonId, slots: int) -> Mapping[str, Any]:
    """Request that many slots from the process. Raises ClusterError if it refuses or does not answer."""
    processes.alive(daemon)  # raises on another host, where the socket has no server
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ORDER_S)
        try:
            _connect(connection, cluster.folder)
            with connection.makefile("rw") as stream:
                stream.write(json.dumps({"slots": slots}) + "\n")
                stream.flush()
                answer: dict[str, Any] = json.loads(stream.readline())
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"the process that holds the cluster {cluster.name} (pid {daemon.pid}) does not answer: {error}"
                f"{_log_end(cluster)}"
            ) from error
    if "error" in answer:
        raise ClusterError(f"{answer['error']}; for details: ddptrain cluster logs {cluster.name}")
    return answer


def _connect(connection: socket.socket, folder: Path) -> None:
    """Connect to the process. A socket path that is too long for the system is shortened through /proc."""
    path = folder / SOCKET_FILE
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        connection.connect(str(path))
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{descriptor}/{SOCKET_FILE}")
    finally:
        os.close(descriptor)


def _process(cluster: Deployment) -> DaemonId | None:
    part = cluster.record.parts.get(_PROCESS)
    return DaemonId.of(part) if part else None
