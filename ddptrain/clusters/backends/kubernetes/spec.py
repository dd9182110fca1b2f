"""The Kubernetes objects of a cluster: a DaskCluster, which the operator of dask-kubernetes turns into pods.

The pods run the same programs as clusters elsewhere: our scheduler, with TLS, and one worker with a slot per GPU.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.clusters.security import CERT_FILE, KEY_FILE
from ddptrain.config.sections.clusters import KubernetesSettings
from ddptrain.errors import UsageError

COMM_PORT = 8786
HTTP_PORT = 8787
MANAGED = {"app.kubernetes.io/managed-by": "ddptrain"}
OWNER_LABEL = "ddptrain-owner"  # a random value for each cluster, which identifies our objects
SLOTS_LABEL = "ddptrain-slots"  # of each worker pod
_GPU = "nvidia.com/gpu"
_FOLDER = "/run/ddptrain"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # a mount point in the pod
_GRACE_S = 10
# "-scheduler" is appended, and a label holds 63 characters.
_NAME = re.compile(r"(?=.{1,53}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def checked_name(name: str) -> str:
    """Return the name. Raises UsageError if Kubernetes does not allow it."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f'"{name}" is not a cluster name in Kubernetes: use at most 53 lower-case letters, digits and dashes'
        )
    return name


def service_name(name: str) -> str:
    """Return the name of the scheduler's service and deployment."""
    return f"{name}-scheduler"


def worker_group(name: str) -> str:
    """Return the name of the DaskWorkerGroup that the operator creates."""
    return f"{name}-default"


def secret_name(name: str) -> str:
    """Return the name of the secret with the cluster's certificate and key."""
    return f"{name}-ddptrain-tls"


def slots_of(labels: Mapping[str, str]) -> int:
    """Return the slots of each worker pod of a DaskCluster with these labels; 1 if it is not one of ours."""
    return int(labels[SLOTS_LABEL]) if labels.get(SLOTS_LABEL, "").isdigit() else 1


def slots_per_worker(settings: KubernetesSettings) -> int:
    """Return the slots of each worker pod: one per GPU, or as configured."""
    return settings.gpus_per_worker or settings.ranks_per_worker


def secret_spec(name: str, owner: str, folder: Path) -> dict[str, Any]:
    """Return the secret that mounts the certificate and key of `folder` in the pods."""
    files = {file: base64.b64encode((folder / file).read_bytes()).decode() for file in (CERT_FILE, KEY_FILE)}
    metadata = {"name": secret_name(name), "labels": {**MANAGED, OWNER_LABEL: owner}}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": files}


def cluster_spec(
    name: str, namespace: str, owner: str, workers: int, settings: KubernetesSettings, idle_timeout_s: float
) -> dict[str, Any]:
    """Return the DaskCluster."""
    from dask_kubernetes.operator import make_cluster_spec

    spec: dict[str, Any] = make_cluster_spec(
        name=name,
        image=settings.image,
        n_workers=workers,
        resources={},
        env=dict(settings.env),
        scheduler_service_type=settings.scheduler_service_type,
        idle_timeout=round(idle_timeout_s),
    )
    slots = slots_per_worker(settings)
    spec["metadata"]["labels"] = {**MANAGED, OWNER_LABEL: owner, SLOTS_LABEL: str(slots)}
    _fill_scheduler(spec["spec"]["scheduler"], name, settings, tells_idle=idle_timeout_s > 0)
    _fill_worker(spec["spec"]["worker"]["spec"], f"{service_name(name)}.{namespace}.svc", slots, settings)
    for pod in (spec["spec"]["scheduler"]["spec"], spec["spec"]["worker"]["spec"]):
        _fill_pod(pod, name, settings)
    return spec


def _fill_scheduler(part: dict[str, Any], name: str, settings: KubernetesSettings, *, tells_idle: bool) -> None:
    container = part["spec"]["containers"][0]
    container["args"] = [
        *("python", "-P", "-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", _FOLDER),
        *("--host", "0.0.0.0", "--port", str(COMM_PORT)),  # a port-forward arrives on the pod's loopback
        *("--dashboard-address", f"0.0.0.0:{HTTP_PORT}"),
        *(("--http-route", "ddptrain.clusters.backends.kubernetes.idle_route") if tells_idle else ()),
    ]
    # No HTTP probe: the dashboard exists only if the image has bokeh. The scheduler deletes the file when it ends.
    container["readinessProbe"] = {
        "exec": {"command": ["test", "-f", f"{_FOLDER}/scheduler.json"]},
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    del container["livenessProbe"]
    # The scheduler writes files beside the certificate, and the mount of a secret is read-only.
    container["volumeMounts"] = [
        {"name": "ddptrain", "mountPath": _FOLDER},
        *(
            {"name": "ddptrain-tls", "mountPath": f"{_FOLDER}/{file}", "subPath": file}
            for file in (CERT_FILE, KEY_FILE)
        ),
    ]
    part["spec"]["volumes"] = [{"name": "ddptrain", "emptyDir": {}}]
    if settings.scheduler_service_type == "LoadBalancer":
        # Only the port with TLS can be reached from outside.
        part["service"]["ports"] = [port for port in part["service"]["ports"] if port["port"] == COMM_PORT]


def _fill_worker(pod: dict[str, Any], scheduler_host: str, slots: int, settings: KubernetesSettings) -> None:
    container = pod["containers"][0]
    # The operator sets DASK_WORKER_NAME, to the worker's deployment. It would set this one as well, but without TLS.
    container["env"] = [
        {"name": "DASK_SCHEDULER_ADDRESS", "value": f"tls://{scheduler_host}:{COMM_PORT}"},
        *container["env"],
    ]
    container["args"] = [
        *("python", "-P", "-m", "ddptrain.worker", "--scheduler", "$(DASK_SCHEDULER_ADDRESS)"),
        *("--name", "$(DASK_WORKER_NAME)", "--tls-dir", _FOLDER),
        *("--slots", str(slots), "--gpus", "auto" if settings.gpus_per_worker else "none"),
    ]
    container["ports"] = []
    container["resources"] = _resources(settings)
    container["volumeMounts"] = [{"name": "ddptrain-tls", "mountPath": _FOLDER}, *settings.volume_mounts]
    pod["volumes"] = list(settings.volumes)
    if all(mount.get("mountPath") != _SHARED_MEMORY for mount in settings.volume_mounts):
        # 64 MB otherwise, which is too little for NCCL and for DataLoader's workers.
        container["volumeMounts"].append({"name": "ddptrain-shm", "mountPath": _SHARED_MEMORY})
        pod["volumes"].append({"name": "ddptrain-shm", "emptyDir": {"medium": "Memory"}})


def _fill_pod(pod: dict[str, Any], name: str, settings: KubernetesSettings) -> None:
    # The user that the image runs as must be able to read it.
    secret = {"secretName": secret_name(name), "defaultMode": 0o444}
    pod["volumes"] = [{"name": "ddptrain-tls", "secret": secret}, *pod["volumes"]]
    pod["terminationGracePeriodSeconds"] = _GRACE_S
    if settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        pod["tolerations"] = list(settings.tolerations)
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account


def _resources(settings: KubernetesSettings) -> dict[str, dict[str, str]]:
    """Return requests and limits; the schema of the operator wants strings."""
    requests, limits = settings.resources.requests, settings.resources.limits
    if settings.gpus_per_worker:
        limits = {_GPU: settings.gpus_per_worker, **limits}
    resources = {"requests": requests, "limits": limits}
    return {part: {key: str(value) for key, value in values.items()} for part, values in resources.items() if values}
