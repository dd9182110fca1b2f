"""What pods tell of themselves: why one does not start, and what it has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.clusters.backends.kubernetes.api import APPS, CORE, Kubernetes

# What a pod waits for that will not come by itself; ErrImagePull is tried again once, and is then ImagePullBackOff.
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
class Trouble:
    """What keeps a pod from running; `hopeless` if waiting won't help."""

    words: str
    hopeless: bool


def cluster_labels(name: str, component: str = "") -> dict[str, str]:
    """The operator's labels for what belongs to a cluster: its "scheduler", its "worker"s, or everything."""
    return {"dask.org/cluster-name": name} | ({"dask.org/component": component} if component else {})


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether its containers run, and have passed their probes."""
    return any(each["type"] == "Ready" and each["status"] == "True" for each in _conditions(pod))


def trouble_of(pod: Mapping[str, Any]) -> Trouble | None:
    """What keeps a pod from running, if anything does."""
    for container in pod.get("status", {}).get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if reason and reason not in _HARMLESS:
            return Trouble(_joined(reason, waiting.get("message", "")), reason in _HOPELESS)
        if ended := container.get("state", {}).get("terminated"):
            return Trouble(f"ended with exit code {ended.get('exitCode')}", hopeless=False)
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Trouble(_joined(condition.get("reason", ""), condition.get("message", "")), hopeless=False)
    return None


async def why_there_is_no_pod(api: Kubernetes, name: str, component: str) -> str:
    """What a deployment says that can't make its pods, as an exceeded quota; "" if none does. Raises ClusterError."""
    for deployment in await api.items(APPS, "deployments", cluster_labels(name, component)):
        for condition in _conditions(deployment):
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                return _joined(condition.get("reason", ""), condition.get("message", ""))
    return ""


async def log_of(api: Kubernetes, pod: Mapping[str, Any], lines: int) -> str:
    """The last lines of a pod: of its earlier try, if it waits for another; and why it does not run."""
    name = str(pod["metadata"]["name"])
    said = await api.log(name, tailLines=str(lines))
    if not said.strip() and _restarts(pod):
        said = await api.log(name, tailLines=str(lines), previous="true")
    trouble = trouble_of(pod)
    return "\n".join(part for part in (said.rstrip(), f"({trouble.words})" if trouble else "") if part)


async def logs_of(api: Kubernetes, name: str, lines: int) -> dict[str, str]:
    """The last lines of each pod of a cluster, by what and which it is. Raises ClusterError."""
    told = {}
    for component in ("scheduler", "worker"):
        pods = await api.items(CORE, "pods", cluster_labels(name, component))
        if not pods and (why := await why_there_is_no_pod(api, name, component)):
            told[component] = f"({why})"
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
            told[_source(component, pod)] = await log_of(api, pod, lines)
    return told


def _source(component: str, pod: Mapping[str, Any]) -> str:
    """The scheduler, or a worker by the name that Dask knows it by, which is that of its deployment."""
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
