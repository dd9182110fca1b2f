"""Clusters in Kubernetes: DaskClusters, which dask-kubernetes' operator turns into a scheduler and worker pods.

If the namespace has a DaskCluster of that name, it is used as it is, and `stop` leaves it running.
"""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.clusters import status
from ddptrain.clusters.backends.kubernetes import reach, spec
from ddptrain.clusters.backends.kubernetes.api_client import APPS, CORE, DASK, INSTALL_OPERATOR, Kubernetes, connected
from ddptrain.clusters.backends.kubernetes.pods import (
    cluster_labels,
    is_ready,
    log_of,
    logs_of,
    trouble_of,
    why_there_is_no_pod,
)
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.security import CERT_FILE, KEY_FILE, make_tls, write_private
from ddptrain.config.sections.clusters import KubernetesSettings
from ddptrain.errors import ClusterError, UsageError
from ddptrain.host_identity import known_fields
from ddptrain.worker import driver_calls

_POLL_S = 0.3
_TELL_EVERY_S = 5.0  # seconds between progress messages: a user may want to interrupt the wait
_STOP_S = 60.0  # the pods have 10 s; the operator and the garbage collector need some time as well
_ASK_S = 15.0  # a scheduler on a busy machine answers late, and without its answer nothing can be scaled
_LOG_LINES = 5
# The kinds of objects of a cluster, owners first; all have its labels.
_KINDS = {"daskclusters": DASK, "daskworkergroups": DASK, "deployments": APPS, "pods": CORE, "secrets": CORE}


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a cluster: everything that is needed to find and delete them.

    `owner` is the value of the label that marks our objects; `slots` is the number of slots of each worker pod.
    """

    context: str
    namespace: str
    owner: str
    attached: bool = False
    slots: int = 1

    @classmethod
    def of(cls, cluster: Deployment) -> Parts | None:
        """Return the parts of a cluster; None before anything was created."""
        parts = cluster.record.parts
        return cls(**known_fields(cls, parts)) if "owner" in parts else None

    def save(self, cluster: Deployment) -> None:
        """Save them in the cluster's record."""
        values = {name: getattr(self, name) for name in self.__slots__}
        cluster.update(parts={**cluster.record.parts, **values})


class KubernetesProvider:
    """Starts, changes and deletes clusters in Kubernetes."""

    tls = None  # always for clusters that are created here; an existing cluster decides for itself

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Create, attach to or scale a cluster, and wait for its scheduler. Raises ClusterError, UsageError."""
        spec.checked_name(cluster.name)
        asyncio.run(_Order(cluster, tell).scale(slots))

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """Return the last lines of each pod, and why it does not run. Raises ClusterError."""
        return {**asyncio.run(_logs(cluster, lines)), **reach.log(cluster, lines)}

    def fault(self, cluster: Deployment) -> str | None:
        """Return why a pod will never run, or None. Raises ClusterError."""
        return asyncio.run(_fault(cluster))

    @staticmethod
    def reopen(cluster: Deployment) -> None:
        """Start the port-forward again if it has ended, for example after a restart. Raises ClusterError."""
        reach.reopen(cluster)

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """Delete the cluster with its pods; one that was only attached to stays. Raises ClusterError."""
        reach.close(cluster)
        asyncio.run(_stop(cluster, tell))


class _Order:
    """One call of scale."""

    def __init__(self, cluster: Deployment, tell: Tell) -> None:
        settings = cluster.record.settings
        self.cluster = cluster
        self.tell = tell
        self.settings = KubernetesSettings.model_validate(settings["kubernetes"])
        self.ranks = settings.get("ranks")
        self.timeout_s = float(settings["start_timeout_s"])
        self.deadline = time.monotonic() + self.timeout_s

    async def scale(self, slots: int | None) -> None:
        """Create everything, and wait for the scheduler."""
        name, parts = self.cluster.name, Parts.of(self.cluster)
        place = parts or self.settings
        async with connected(place.context, place.namespace) as api:
            found = await api.get(DASK, f"daskclusters/{name}")
            if parts is not None and found is None:
                raise ClusterError(f"the DaskCluster {name} does not exist in the namespace {api.namespace}")
            if parts is not None:
                await resize(api, self.cluster, self._workers(parts.slots, slots), parts.slots, self.tell)
            elif found is not None:
                await self._attach(api, found)
            else:
                await self._create(api, slots)
            await self._await_scheduler(api)
            await reach.open_way(api, self.cluster, self.deadline)

    def _workers(self, slots_each: int, slots: int | None) -> int:
        """Return the number of worker pods for that many slots; None means as configured."""
        wanted = slots if slots is not None else self.ranks
        return math.ceil(wanted / slots_each) if isinstance(wanted, int) else self.settings.workers

    async def _create(self, api: Kubernetes, slots: int | None) -> None:
        name, idle_timeout_s = self.cluster.name, self.cluster.record.idle_timeout_s
        if idle_timeout_s and self.settings.scheduler_service_type == "LoadBalancer":
            raise UsageError(
                "cluster.idle_timeout_s can't be kept with scheduler_service_type LoadBalancer: that publishes the "
                "scheduler's TLS port alone, and the operator asks another one whether it is idle"
            )
        parts = Parts(api.context, api.namespace, secrets.token_hex(8), slots=spec.slots_per_worker(self.settings))
        workers = self._workers(parts.slots, slots)
        body = spec.cluster_spec(name, api.namespace, parts.owner, workers, self.settings, idle_timeout_s)
        make_tls(self.cluster.folder)
        parts.save(self.cluster)
        self.cluster.update(workers=workers)
        self.tell(f"creating the DaskCluster {name} in the namespace {api.namespace}")
        await api.create(CORE, "secrets", spec.secret_spec(name, parts.owner, self.cluster.folder))
        created = await api.create(DASK, "daskclusters", body)
        # With this owner reference, the key is deleted together with the DaskCluster.
        owner = {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "name": name,
            "uid": created["metadata"]["uid"],
        }
        await api.patch(CORE, f"secrets/{spec.secret_name(name)}", {"metadata": {"ownerReferences": [owner]}})

    async def _attach(self, api: Kubernetes, found: Mapping[str, Any]) -> None:
        """Use an existing cluster as it is. The certificate of one of ours is read from its secret."""
        name, labels = self.cluster.name, found["metadata"].get("labels", {})
        secret = await api.get(CORE, f"secrets/{spec.secret_name(name)}") if spec.OWNER_LABEL in labels else None
        for file, text in secret["data"].items() if secret else ():
            if file in (CERT_FILE, KEY_FILE):
                write_private(self.cluster.folder / file, base64.b64decode(text))
        group = await api.get(DASK, f"daskworkergroups/{spec.worker_group(name)}") or found
        Parts(api.context, api.namespace, "", attached=True, slots=spec.slots_of(labels)).save(self.cluster)
        self.cluster.update(workers=group["spec"]["worker"]["replicas"])
        self.tell(
            f"the namespace {api.namespace} has a DaskCluster {name}, maybe of another user: it is used as it is, and "
            "the image and size that are configured here are ignored; for a cluster of your own choose another --name"
        )

    async def _await_scheduler(self, api: Kubernetes) -> None:
        """Wait until the scheduler's pod is ready. Raises ClusterError if it never will be, or not in time."""
        shown_at, shown = 0.0, ""
        while True:
            pods = await api.items(CORE, "pods", cluster_labels(self.cluster.name, "scheduler"))
            if any(is_ready(pod) for pod in pods):
                return
            trouble = trouble_of(pods[0]) if pods else None
            words = (
                f"the scheduler's pod: {trouble.description if trouble else 'is starting' if pods else 'not there yet'}"
            )
            now = time.monotonic()
            if (trouble and trouble.hopeless) or now > self.deadline:
                raise ClusterError(await self._why_not(api, pods, words))
            if words != shown or now - shown_at > _TELL_EVERY_S:
                self.tell(words)
                shown_at, shown = now, words
            await asyncio.sleep(_POLL_S)

    async def _why_not(self, api: Kubernetes, pods: Sequence[Mapping[str, Any]], words: str) -> str:
        """Return why the scheduler is not ready."""
        name = self.cluster.name
        if pods:
            log_lines = (await log_of(api, pods[0], _LOG_LINES)).splitlines()
            late = "" if trouble_of(pods[0]) else f" after {self.timeout_s:g} s (cluster.start_timeout_s)"
            return f"{words}{late}" + "".join(f"\n  {line}" for line in log_lines[:-1])
        if why := await why_there_is_no_pod(api, name, "scheduler"):
            return f"the scheduler of {name} gets no pod: {why}"
        found = await api.get(DASK, f"daskclusters/{name}") or {}
        if found.get("status", {}).get("phase"):
            return f"the scheduler of {name} has got no pod within {self.timeout_s:g} s (cluster.start_timeout_s)"
        return (
            f"no operator has started the DaskCluster {name} within {self.timeout_s:g} s: is dask-kubernetes' operator "
            f"running, and does it watch the namespace {api.namespace}? It is installed with {INSTALL_OPERATOR}"
        )


async def resize(api: Kubernetes, cluster: Deployment, wanted: int, slots_each: int, tell: Tell) -> None:
    """Scale to `wanted` worker pods. Pods in use stay, with as many slots as the runs hold. Raises ClusterError.

    The pods to delete are chosen here: the operator would ask the scheduler without TLS, and if that fails delete any.
    """
    group = spec.worker_group(cluster.name)
    labels = {**cluster_labels(cluster.name, "worker"), "dask.org/workergroup-name": group}
    names = [str(each["metadata"]["name"]) for each in await api.items(APPS, "deployments", labels)]
    joined = await asyncio.to_thread(_joined, cluster)
    names.sort(key=lambda name: (name in joined, joined[name].held if name in joined else 0))
    first, rest = names[: max(0, len(names) - wanted)], names[max(0, len(names) - wanted) :]
    leaving = [name for name in first if name not in joined or not joined[name].held]
    for name in leaving:
        await api.delete(APPS, f"deployments/{name}")
    staying = [name for name in first if name not in leaving]
    if staying:
        tell(f"runs use {len(staying)} of the workers to remove: scale again when the runs have ended")
    slots = {joined[name].address: joined[name].held for name in staying if joined[name].warm is not None}
    slots |= {each.address: slots_each for name, each in joined.items() if name in rest and each.slots < slots_each}
    await asyncio.to_thread(_set_slots, cluster, slots)
    # The number of replicas equals the number of pods, so the operator deletes none.
    replicas = max(wanted, len(names) - len(leaving))
    await api.patch(DASK, f"daskworkergroups/{group}", {"spec": {"worker": {"replicas": replicas}}})
    cluster.update(workers=replicas)


def _joined(cluster: Deployment) -> dict[str, status.WorkerView]:
    """Return the workers by name, as the scheduler reports them. Raises ClusterError."""
    view = status.probe(cluster, _ASK_S)
    if view.state != status.State.UP:
        raise ClusterError(f"it is not known which workers are free: {view.reason}")
    return {worker.name: worker for worker in view.workers}


def _set_slots(cluster: Deployment, slots: Mapping[str, int]) -> None:
    """Set the number of slots of our own workers, by address."""
    if not slots:
        return
    with status.client_of(cluster, _ASK_S) as client:
        for address, count in slots.items():
            client.run(driver_calls.set_slots, count, workers=[address])


async def _logs(cluster: Deployment, lines: int) -> dict[str, str]:
    parts = Parts.of(cluster)
    if parts is None:
        return {}
    async with connected(parts.context, parts.namespace) as api:
        return await logs_of(api, cluster.name, lines)


async def _fault(cluster: Deployment) -> str | None:
    parts = Parts.of(cluster)
    if parts is None:
        return None
    async with connected(parts.context, parts.namespace) as api:
        for pod in await api.items(CORE, "pods", cluster_labels(cluster.name)):
            trouble = trouble_of(pod)
            if trouble and trouble.hopeless:
                return f"the pod {pod['metadata']['name']}: {trouble.description}"
    return None


async def _stop(cluster: Deployment, tell: Tell) -> None:
    parts = Parts.of(cluster)
    if parts is None:
        return
    if parts.attached:
        tell(f"the DaskCluster {cluster.name} was there before, and keeps running: kubectl delete daskcluster ends it")
        return
    ours = {spec.OWNER_LABEL: parts.owner}
    async with connected(parts.context, parts.namespace) as api:
        await _delete(api, "daskclusters", ours)
        await _delete(api, "secrets", ours)
        deadline = time.monotonic() + _STOP_S
        while left := [
            f"{plural.removesuffix('s')} {name}" for plural in _KINDS for name in await _names(api, plural, ours)
        ]:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Kubernetes has not ended {', '.join(left)} within {_STOP_S:g} s: is dask-kubernetes' operator "
                    f"running? See kubectl --namespace {api.namespace} get {','.join(_KINDS)}"
                )
            if not left[0].startswith("daskcluster "):
                # The operator sets the owner of a worker group after creating it; the owner may be deleted by then.
                await _delete(api, "daskworkergroups", ours)
            await asyncio.sleep(_POLL_S)


async def _names(api: Kubernetes, plural: str, labels: Mapping[str, str]) -> list[str]:
    return [str(thing["metadata"]["name"]) for thing in await api.items(_KINDS[plural], plural, labels)]


async def _delete(api: Kubernetes, plural: str, labels: Mapping[str, str]) -> None:
    for name in await _names(api, plural, labels):
        await api.delete(_KINDS[plural], f"{plural}/{name}")
