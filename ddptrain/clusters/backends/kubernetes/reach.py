"""The connection to the scheduler of a cluster in Kubernetes.

From a pod the scheduler is reached by the name of its service. From outside it is reached through the load balancer of
the service, or, without one, through a port-forward: a process on this machine that outlives the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.clusters import processes
from ddptrain.clusters.backends.kubernetes import spec
from ddptrain.clusters.backends.kubernetes.api_client import CORE, Kubernetes
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.processes import DaemonId, DaemonOrder
from ddptrain.errors import ClusterError

_FORWARD = "port-forward"
_START_S = 20.0
_POLL_S = 0.1
_LOOK_S = 2.0


async def open_way(api: Kubernetes, cluster: Deployment, deadline: float) -> None:
    """Save an address that reaches the scheduler in the cluster's record, by a monotonic time. Raises ClusterError."""
    name = spec.service_name(cluster.name)
    service = await _service(api, name, deadline)
    inner = f"{name}.{api.namespace}.svc"
    if service["spec"].get("type") == "LoadBalancer":
        host, port, http_port = await _balancer(api, name, deadline), spec.COMM_PORT, 0
    elif await asyncio.to_thread(_resolves, inner):
        host, port, http_port = inner, spec.COMM_PORT, spec.HTTP_PORT
    else:
        host = "127.0.0.1"
        port, http_port = await asyncio.to_thread(_forwarded, api.context, api.namespace, cluster)
    dashboard = f"http://{host}:{http_port}/status"
    has_one = http_port and await asyncio.to_thread(_answers, dashboard)
    scheme = "tls" if cluster.tls_dir is not None else "tcp"
    cluster.update(address=f"{scheme}://{host}:{port}", dashboard=dashboard if has_one else "")


def reopen(cluster: Deployment) -> None:
    """Start the port-forward again if it has ended, for example after a restart. Raises ClusterError."""
    record = cluster.record
    if not record.parts.get("forward") or processes.alive(DaemonId.of(record.parts["forward"])):
        return
    port, http_port = _forwarded(record.parts["context"], record.parts["namespace"], cluster)
    if record.address:  # the start was completed
        scheme = record.address.partition("://")[0]
        dashboard = f"http://127.0.0.1:{http_port}/status" if record.dashboard else ""
        cluster.update(address=f"{scheme}://127.0.0.1:{port}", dashboard=dashboard)


def close(cluster: Deployment) -> None:
    """End the port-forward. Raises ClusterError."""
    if forward := cluster.record.parts.get("forward"):
        processes.stop([DaemonId.of(forward)])
        cluster.update(parts={**cluster.record.parts, "forward": {}})


def log(cluster: Deployment, lines: int) -> Mapping[str, str]:
    """Return the log of the port-forward, if it has written anything."""
    log_tail = processes.tail(str(cluster.folder), _FORWARD, lines)
    return {_FORWARD: log_tail} if log_tail.strip() else {}


def _forwarded(context: str, namespace: str, cluster: Deployment) -> tuple[int, int]:
    """Return the local ports of scheduler and dashboard, if possible those of before. Starts the process if need be."""
    parts = cluster.record.parts
    if parts.get("forward") and processes.alive(DaemonId.of(parts["forward"])):
        scheduler, dashboard = parts["ports"]
        return scheduler, dashboard
    if parts.get("ports"):
        with contextlib.suppress(ClusterError):
            return _start_forward(context, namespace, cluster, parts["ports"])
    return _start_forward(context, namespace, cluster, [0, 0])


def _start_forward(context: str, namespace: str, cluster: Deployment, local: list[int]) -> tuple[int, int]:
    file = cluster.folder / "forward.json"
    file.unlink(missing_ok=True)
    pairs = [f"{port}:{remote}" for port, remote in zip(local, (spec.COMM_PORT, spec.HTTP_PORT), strict=True)]
    arguments = ["--service", spec.service_name(cluster.name), "--namespace", namespace, "--context", context]
    order = DaemonOrder(
        name=_FORWARD,
        folder=str(cluster.folder),
        files={},
        argv=["-m", "ddptrain.clusters.backends.kubernetes.port_forward", *arguments, "--file", str(file), *pairs],
        env={"KUBECONFIG": os.environ["KUBECONFIG"]} if "KUBECONFIG" in os.environ else {},
    )
    started = processes.start(order)
    cluster.update(parts={**cluster.record.parts, "forward": dataclasses.asdict(started)}, host=started.host)
    deadline = time.monotonic() + _START_S
    while not (ports := _read(file)):
        if not processes.alive(started) or time.monotonic() > deadline:
            raise ClusterError(
                f"the port-forward to the scheduler does not start: {processes.tail(order.folder, _FORWARD, 1).strip()}"
            )
        time.sleep(_POLL_S)
    cluster.update(parts={**cluster.record.parts, "ports": ports})
    return ports[0], ports[1]


def _read(file: Path) -> list[int]:
    try:
        ports = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    return [int(port) for port in ports]


async def _service(api: Kubernetes, name: str, deadline: float) -> Mapping[str, Any]:
    """Return the scheduler's service. The operator may create it after the pod is ready. Raises ClusterError."""
    while (service := await api.get(CORE, f"services/{name}")) is None:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the service {name} is missing from the namespace {api.namespace}: is dask-kubernetes' operator "
                f"running? See kubectl --namespace {api.namespace} get services"
            )
        await asyncio.sleep(_POLL_S)
    return service


async def _balancer(api: Kubernetes, name: str, deadline: float) -> str:
    while True:
        service: Mapping[str, Any] = await api.get(CORE, f"services/{name}") or {}
        for entry in service.get("status", {}).get("loadBalancer", {}).get("ingress") or ():
            return str(entry.get("hostname") or entry["ip"])
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the service {name} has got no address from a load balancer in time; without one: "
                "cluster.kubernetes.scheduler_service_type: ClusterIP"
            )
        await asyncio.sleep(_POLL_S)


def _resolves(host: str) -> bool:
    """Return whether this process runs in a pod that can resolve the service's name."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return False
    try:
        socket.getaddrinfo(host, spec.COMM_PORT)
    except OSError:
        return False
    return True


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=_LOOK_S) as answer:
        return bool(answer.status == 200)
    return False
