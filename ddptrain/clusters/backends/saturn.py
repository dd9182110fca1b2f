"""Clusters in Saturn Cloud, through dask-saturn. They need no process on this machine.

Saturn has one Dask cluster for each resource; the token identifies the resource. A cluster that runs already is used as
it is, and `stop` leaves it running. The token is read from SATURN_TOKEN each time and is never stored.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from ddptrain.clusters import processes, security
from ddptrain.clusters.backends.foreign_cluster import dask_logs, spare_runs
from ddptrain.clusters.backends.saturn_api import CLOSED, NotTaken, Saturn
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.processes import DaemonId, DaemonOrder
from ddptrain.clusters.provider import Tell
from ddptrain.config.sections.clusters import SaturnSettings
from ddptrain.errors import ClusterError, UsageError

_WATCH = "idle-watch"
_POLL_S = 1.0
_TELL_EVERY_S = 5.0  # seconds between progress messages: a user may want to interrupt the wait
_STOP_S = 60.0  # machines take longer to end than processes


class SaturnProvider:
    """Starts, scales and closes the Dask cluster of a Saturn resource."""

    tls = None  # Saturn signs certificates for clients outside of Saturn

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Start the cluster and wait for its scheduler, or scale it. Raises ClusterError, UsageError."""
        settings = _settings(cluster)
        if cluster.record.parts:
            if slots is not None:
                spare_runs(cluster, slots)
                machines = math.ceil(slots / settings.nprocs)
                _saturn(cluster).scale(cluster.record.parts["id"], machines)
                cluster.update(workers=machines * settings.nprocs)
            return
        ranks = slots if slots is not None else cluster.record.settings["ranks"]
        machines = math.ceil(ranks / settings.nprocs) if isinstance(ranks, int) else settings.workers
        saturn = _saturn(cluster)
        saturn.check_sizes([size for size in (settings.worker_size, settings.scheduler_size) if size])
        _await_ready(cluster, saturn, _order(settings, machines), tell)
        _reach(cluster, saturn, machines * settings.nprocs)
        if cluster.record.idle_timeout_s and not cluster.record.parts["attached"]:
            _start_watch(cluster)

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """Return the logs that Dask keeps of scheduler and workers; the pages of Saturn show more."""
        return dask_logs(cluster, lines)

    def fault(self, cluster: Deployment) -> str | None:
        """Return why the cluster has failed or ended in Saturn, or None. Raises ClusterError, UsageError."""
        if not cluster.record.parts.get("id"):
            return None
        status = _saturn(cluster).status(cluster.record.parts["id"])
        return f"its status in Saturn is {status or 'gone'}" if status in ("error", *CLOSED) else None

    @staticmethod
    def reopen(cluster: Deployment) -> None:
        """Get a new certificate if that of this machine has expired. Raises ClusterError, UsageError."""
        if cluster.tls_dir is not None and security.has_expired(cluster.tls_dir):
            security.keep(_saturn(cluster).security(cluster.record.parts["id"]), cluster.folder)

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """Make Saturn close the cluster, unless it was running before `up`. Raises ClusterError, UsageError."""
        if watch := cluster.record.parts.get(_WATCH):
            processes.stop([DaemonId.of(watch)])
        close(cluster, tell)


def close(cluster: Deployment, tell: Tell) -> None:
    """Make Saturn close the cluster, also after an interrupted start. Raises ClusterError, UsageError."""
    parts = cluster.record.parts
    if not parts:
        return
    if parts["attached"]:
        tell(
            f"the cluster {parts['id']} was running in Saturn before, and keeps running: Saturn's web pages can end it"
        )
        return
    saturn = _saturn(cluster)
    cluster_id = parts["id"] or _id_of_broken_start(cluster, saturn)
    if not cluster_id or saturn.status(cluster_id) in CLOSED:
        return
    saturn.close(cluster_id)
    deadline, shown = time.monotonic() + _STOP_S, ""
    while (status := saturn.status(cluster_id)) not in CLOSED:
        if status != shown:
            tell(f"Saturn: {status}")
            shown = status
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Saturn was asked to close the cluster {cluster_id}, but it is {status} after {_STOP_S:g} s"
            )
        time.sleep(_POLL_S)


def _id_of_broken_start(cluster: Deployment, saturn: Saturn) -> str:
    """The id of a cluster whose start was interrupted: a second request returns it. "" if there is nothing to close."""
    answer = saturn.order(_order(_settings(cluster), 1))
    if not answer.get("id") and answer.get("status") != "error":
        raise ClusterError(
            "Saturn starts the cluster, and has not returned its id yet: try again, or end it on Saturn's web pages"
        )
    return str(answer.get("id") or "")


def _order(settings: SaturnSettings, machines: int) -> dict[str, Any]:
    """Return the request body that SaturnCluster would send. Settings that are not given keep their value in Saturn."""
    wanted = {
        "n_workers": machines,
        "worker_size": settings.worker_size,
        "worker_is_spot": settings.worker_is_spot,
        "scheduler_size": settings.scheduler_size,
        "nprocs": settings.nprocs,
        "nthreads": settings.nthreads,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _await_ready(cluster: Deployment, saturn: Saturn, order: Mapping[str, Any], tell: Tell) -> None:
    """Poll Saturn until the cluster is ready. Raises ClusterError."""
    timeout_s = float(cluster.record.settings["start_timeout_s"])
    began = time.monotonic()
    status, told_at = _begin(cluster, saturn, order, tell), began
    tell(f"Saturn: {status}")
    while status != "ready":
        time.sleep(_POLL_S)
        before, status = status, _asked(cluster, saturn.order(order))
        now = time.monotonic()
        if status != before or now - told_at > _TELL_EVERY_S:
            tell(f"Saturn: {status}")
            told_at = now
        if status != "ready" and now - began > timeout_s:
            raise ClusterError(f"Saturn's cluster is {status} after {timeout_s:g} s (cluster.start_timeout_s)")


def _begin(cluster: Deployment, saturn: Saturn, order: Mapping[str, Any], tell: Tell) -> str:
    """Send the first request; returns the status of the cluster. Raises ClusterError, UsageError."""
    cluster.update(parts={"url": saturn.url, "id": "", "attached": False})
    try:
        answer = saturn.order(order)
    except (NotTaken, UsageError):
        cluster.update(parts={})
        raise
    for warning in answer.get("warnings", ()):
        tell(f"Saturn warns: {warning}")
    if answer.get("status") == "ready":
        cluster.update(parts={**cluster.record.parts, "attached": True})
    return _asked(cluster, answer)


def _asked(cluster: Deployment, answer: Mapping[str, Any]) -> str:
    """Return the status in an answer; its id is saved. Raises ClusterError if the start has failed in Saturn."""
    cluster_id = str(answer.get("id") or "")
    if cluster_id != cluster.record.parts["id"]:
        cluster.update(parts={**cluster.record.parts, "id": cluster_id})
    if answer.get("status") == "error":
        raise ClusterError(f"Saturn can't start the cluster: {' '.join(answer.get('errors', ['it does not say why']))}")
    return str(answer.get("status"))


def _reach(cluster: Deployment, saturn: Saturn, workers: int) -> None:
    """Save the address and the certificate that later commands need to connect. Raises ClusterError."""
    parts = cluster.record.parts
    address, dashboard = saturn.scheduler(parts["id"])
    if saturn.is_external:
        security.keep(saturn.security(parts["id"]), cluster.folder)
    if parts["attached"]:
        workers = saturn.workers(parts["id"])
    cluster.update(address=address, dashboard=dashboard, workers=workers)


def _start_watch(cluster: Deployment) -> None:
    """Start a process on this machine that closes the cluster after its idle time: Saturn does not know about runs."""
    arguments = ["-m", "ddptrain.clusters.backends.saturn_idle", "--name", cluster.name]
    started = processes.start(DaemonOrder(_WATCH, str(cluster.folder), arguments))
    cluster.update(parts={**cluster.record.parts, _WATCH: dataclasses.asdict(started)})


def _settings(cluster: Deployment) -> SaturnSettings:
    return SaturnSettings.model_validate(cluster.record.settings["saturn"] or {})


def _saturn(cluster: Deployment) -> Saturn:
    return Saturn(cluster.record.parts.get("url") or _settings(cluster).url)
