"""Clusters of any `distributed.deploy.Cluster` class: LocalCluster, FargateCluster, Coiled, LSFCluster, ...

Such an object lives in a process: a detached one, the keeper, builds it, and closes it in the end.
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
from ddptrain.clusters.backends.dask_class_process import ORDER_FILE, SOCKET_FILE, KeeperOrder
from ddptrain.clusters.backends.foreign_cluster import dask_logs, spare_runs
from ddptrain.clusters.processes import DaemonId, DaemonOrder
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.scheduler.process import SCHEDULER_FILE
from ddptrain.clusters.state import Deployment
from ddptrain.errors import ClusterError, UsageError

_KEEPER = "keeper"
_POLL_S = 0.05
_TELL_EVERY_S = 5.0  # whoever waits may want to stop waiting
_ORDER_S = 60.0  # some classes return from scale() when all is done
_STOP_S = 60.0  # what is in a cloud takes longer to end than a process
_LOG_LINES = 8
_LONGEST_PATH = 100  # of a socket, in bytes: the system's limit is 104 or 108


class DeployProvider:
    """Has a keeper build the class that the configuration names, with its arguments."""

    tls = None  # the class sees to it

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Start the keeper and wait until the class is built, or have it order other workers.

        Raises: ClusterError, UsageError
        """
        keeper = _keeper(cluster)
        if keeper is None:
            _start(cluster, slots)
            cluster.update(workers=_await_card(cluster, tell)["workers"])
        elif slots is not None:
            spare_runs(cluster, slots)
            cluster.update(workers=_order(cluster, keeper, slots)["workers"])

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """What the keeper has written, and what Dask keeps of scheduler and workers."""
        return {_KEEPER: processes.tail(str(cluster.folder), _KEEPER, lines), **dask_logs(cluster, lines)}

    def fault(self, cluster: Deployment) -> str | None:
        """Why the keeper has ended."""
        keeper = _keeper(cluster)
        if keeper is None or processes.alive(keeper):
            return None
        return _words_of_end(cluster, keeper)

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """Have the keeper close its Cluster. One that is still being built is closed after that.

        Raises: ClusterError where that takes too long, or where something may be left
        """
        keeper = _keeper(cluster)
        if keeper is None:
            return
        name = cluster.record.settings["class"]
        if processes.alive(keeper):
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper.pid, signal.SIGTERM)
            _await_end(cluster, keeper, tell)
        elif not cluster.ended:
            tell(f"the keeper (pid {keeper.pid}) was killed: what {name} has started elsewhere may still be there")
        if cluster.ended.get("is_left"):
            cluster.update(parts={})  # the next attempt has nothing more to end
            raise ClusterError(f"{cluster.ended['reason']}; ddptrain cluster down {cluster.name} forgets it")


def _start(cluster: Deployment, slots: int | None) -> None:
    settings = cluster.record.settings
    ranks = settings["ranks"] if isinstance(settings["ranks"], int) else None
    order = KeeperOrder(
        settings["class"],
        settings["kwargs"],
        slots=slots if slots is not None else ranks,
        idle_timeout_s=cluster.record.idle_timeout_s,
        sys_path=[os.getcwd()],
    )
    arguments = ["-m", "ddptrain.clusters.backends.dask_class_process", "--folder", str(cluster.folder)]
    started = processes.start(DaemonOrder(_KEEPER, str(cluster.folder), arguments, files={ORDER_FILE: order.to_json()}))
    cluster.update(parts={_KEEPER: dataclasses.asdict(started)})


def _await_card(cluster: Deployment, tell: Tell) -> Mapping[str, Any]:
    """What the keeper tells once its Cluster is up. Raises ClusterError, UsageError."""
    keeper = _keeper(cluster)
    assert keeper is not None
    name, timeout_s = cluster.record.settings["class"], float(cluster.record.settings["start_timeout_s"])
    for waited_s in _waiting(tell, f"{name} is starting"):
        with contextlib.suppress(FileNotFoundError):
            card: dict[str, Any] = json.loads((cluster.folder / SCHEDULER_FILE).read_text(encoding="utf-8"))
            return card
        if not processes.alive(keeper):
            kind = UsageError if cluster.ended.get("is_usage") else ClusterError
            raise kind(_words_of_end(cluster, keeper))
        if waited_s > timeout_s:
            raise ClusterError(f"{name} is not up after {timeout_s:g} s (cluster.start_timeout_s){_said(cluster)}")
    raise AssertionError("the wait has no end of its own")


def _await_end(cluster: Deployment, keeper: DaemonId, tell: Tell) -> None:
    is_up = bool(cluster.record.address)
    name = cluster.record.settings["class"]
    for waited_s in _waiting(tell, f"{name} is {'closing' if is_up else 'still starting, and is closed after that'}"):
        if not processes.alive(keeper):
            return
        if waited_s > _STOP_S:
            raise ClusterError(
                f"{name} is still {'closing' if is_up else 'being built'} after {_STOP_S:g} s: its keeper (pid "
                f"{keeper.pid}) will close it and end by itself; ask again with ddptrain cluster down {cluster.name}"
            )


def _waiting(tell: Tell, words: str) -> Iterator[float]:
    """The seconds waited, again and again; now and then it tells what it waits for."""
    began = told = time.monotonic()
    while True:
        now = time.monotonic()
        yield now - began
        if now - told > _TELL_EVERY_S:
            tell(words)
            told = now
        time.sleep(_POLL_S)


def _words_of_end(cluster: Deployment, keeper: DaemonId) -> str:
    """One line of why the keeper has ended, and the end of its log where that does not say it all."""
    ended = cluster.ended
    if ended.get("is_usage"):
        return str(ended["reason"])
    return str(ended.get("reason") or f"the keeper (pid {keeper.pid}) has ended") + _said(cluster)


def _said(cluster: Deployment) -> str:
    log = processes.tail(str(cluster.folder), _KEEPER, _LOG_LINES)
    return "\nlast lines of keeper:\n  " + log.strip().replace("\n", "\n  ") if log.strip() else ""


def _order(cluster: Deployment, keeper: DaemonId, slots: int) -> Mapping[str, Any]:
    """Ask the keeper for that many slots. Raises ClusterError."""
    processes.alive(keeper)  # raises on another host than the keeper's, where its socket leads nowhere
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
                f"the keeper (pid {keeper.pid}) of the cluster {cluster.name} does not answer: {error}{_said(cluster)}"
            ) from error
    if "error" in answer:
        raise ClusterError(f"{answer['error']}; more stands in ddptrain cluster logs {cluster.name}")
    return answer


def _connect(connection: socket.socket, folder: Path) -> None:
    """Connect to the keeper, also where the path of its socket is longer than the system takes."""
    path = folder / SOCKET_FILE
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        connection.connect(str(path))
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{descriptor}/{SOCKET_FILE}")
    finally:
        os.close(descriptor)


def _keeper(cluster: Deployment) -> DaemonId | None:
    part = cluster.record.parts.get(_KEEPER)
    return DaemonId(**part) if part else None
