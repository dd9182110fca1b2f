"""Scaling the worker pods of a cluster in Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ddptrain.clusters import status
from ddptrain.clusters.backends.kubernetes import spec
from ddptrain.clusters.backends.kubernetes.api_client import APPS, DASK, Kubernetes
from ddptrain.clusters.backends.kubernetes.pods import cluster_labels
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.resolve import of_deployment
from ddptrain.clusters.scheduler.scheduler_process import LOOKER
from ddptrain.errors import ClusterError
from ddptrain.worker import driver_calls

_ASK_S = 15.0  # a scheduler on a busy machine answers late, and without its answer nothing can be scaled


async def resize(api: Kubernetes, cluster: Deployment, wanted: int, slots_each: int, tell: Tell) -> None:
    """Scale to `wanted` worker pods. Pods in use stay, with as many slots as the runs hold.

    The pods to delete are chosen here: the operator would ask the scheduler without TLS, and if that fails delete any.

    Raises: ClusterError
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
    """The workers by name, as the scheduler reports them. Raises ClusterError."""
    view = status.probe(cluster, _ASK_S)
    if view.state != status.State.UP:
        raise ClusterError(f"it is not known which workers are free: {view.reason}")
    return {worker.name: worker for worker in view.workers}


def _set_slots(cluster: Deployment, slots: Mapping[str, int]) -> None:
    """Set the number of slots of our own workers, by address."""
    if not slots:
        return
    from distributed import Client

    target = of_deployment(cluster)
    with Client(target.address, security=target.security, timeout=_ASK_S, name=LOOKER, set_as_default=False) as client:
        for address, count in slots.items():
            client.run(driver_calls.set_slots, count, workers=[address])
