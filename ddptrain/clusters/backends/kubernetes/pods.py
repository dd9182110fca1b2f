"""The state of pods: why one does not start, and its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.clusters.backends.kubernetes.api_client import APPS, CORE, Kubernetes

# Reasons that waiting does not remove. ErrImagePull becomes ImagePullBackOff after a second try.
_HOPELESS = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
_HARMLESS = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class PodProblem:
    """What keeps a pod from running; `hopeless` if waiting won't help."""

    description: str
    hopeless: bool


def cluster_labels(name: str, component: str = "") -> dict[str, str]:
    """Return the operator's labels for what belongs to a cluster: its "scheduler", its "worker"s, or everything."""
    return {"dask.org/cluster-name": name} | ({"dask.org/component": component} if component else {})


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether the containers run and have passed their probes."""
    return any(each["type"] == "Ready" and each["status"] == "True" for each in _conditions(pod))


def trouble_of(pod: Mapping[str, Any]) -> PodProblem | None:
    """Return why the pod does not run, or None."""
    for container in pod.get("status", {}).get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if reason and reason not in _HARMLESS:
            return PodProblem(_joined(reason, waiting.get("message", "")), reason in _HOPELESS)
        if ended := container.get("state", {}).get("terminated"):
            return PodProblem(f"ended with exit code {ended.get('exitCode')}", hopeless=False)
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return PodProblem(_joined(condition.get("reason", ""), condition.get("message", "")), hopeless=False)
    return None


async def why_there_is_no_pod(api: Kubernetes, name: str, component: str) -> str:
    """Return why a deployment can't create its pods (such as an exceeded quota), or "". Raises ClusterError."""
    for deployment in await api.items(APPS, "deployments", cluster_labels(name, component)):
        for condition in _conditions(deployment):
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                return _joined(condition.get("reason", ""), condition.get("message", ""))
    return ""


async def log_of(api: Kubernetes, pod: Mapping[str, Any], lines: int) -> str:
    """Return the last log lines of a pod, or of its previous container; and why it does not run."""
    name = str(pod["metadata"]["name"])
    log = await api.log(name, tailLines=str(lines))
    if not log.strip() and _restarts(pod):
        log = await api.log(name, tailLines=str(lines), previous="true")
    trouble = trouble_of(pod)
    return "\n".join(part for part in (log.rstrip(), f"({trouble.description})" if trouble else "") if part)


async def logs_of(api: Kubernetes, name: str, lines: int) -> dict[str, str]:
    """Return the last log lines of each pod of a cluster, by component and name. Raises ClusterError."""
    logs = {}
    for component in ("scheduler", "worker"):
        pods = await api.items(CORE, "pods", cluster_labels(name, component))
        if not pods and (why := await why_there_is_no_pod(api, name, component)):
            logs[component] = f"({why})"
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
            logs[_source(component, pod)] = await log_of(api, pod, lines)
    return logs


def _source(component: str, pod: Mapping[str, Any]) -> str:
    """Return the key for `logs_of`: "scheduler", or "worker" with Dask's name for it, that of its deployment."""
    environment = pod["spec"]["containers"][0].get("env", ())
    names = [each.get("value", "") for each in environment if each["name"] == "DASK_WORKER_NAME"]
    return " ".join([component, *(names or [pod["metadata"]["name"]])]) if component == "worker" else component


def _conditions(thing: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    conditions: Sequence[Mapping[str, Any]] = thing.get("status", {}).get("conditions") or ()
    return conditions


def _restarts(pod: Mapping[str, Any]) -> int:
    return sum(container.get("restartCount", 0) for container in pod.get("status", {}).get("containerStatuses", ()))


def _joined(reason: str, message: str) -> str:
    return ": ".join(part for part in (reason, " ".join(message.split())) if part)
