"""The connection to a cluster: of one run, or shared by several runs of this process, each in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.clusters.backends.embedded import EmbeddedCluster
from ddptrain.clusters.backends.run_cluster import AttachedCluster, RunCluster
from ddptrain.clusters.machine_slots import LocalResources, local_resources
from ddptrain.clusters.provider import Cluster, Tell
from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.config.wording import counted
from ddptrain.protocol.exec_env import without_working_directory

if TYPE_CHECKING:
    from ddptrain.driver.connect import Session
    from ddptrain.driver.control.signals import Signals
    from ddptrain.driver.inbox import Inbox


_APPEAR_S = 5.0  # time for a foreign scheduler to answer a dry run; a run waits for cluster.start_timeout_s


def cluster_for(
    config: RunConfig, machine: LocalResources | None, scratch: Path, tell: Tell, rank_python: str = ""
) -> Cluster:
    """Return the cluster that a configuration names, which is not started yet.

    `machine` are the resources of the embedded cluster, None for other clusters; `rank_python` is that of an
    environment that is installed here.
    """
    if machine is not None:
        environ = without_working_directory(os.environ) if is_built_in(config.workload) else os.environ
        return EmbeddedCluster(machine.ranks, machine.gpus, scratch, environ, rank_python, machine.present)
    if config.cluster.is_attached:
        return AttachedCluster(config.cluster)
    if config.cluster.class_name:
        from ddptrain.clusters.backends.dask_class import DaskClassCluster

        return DaskClassCluster(config.cluster, tell)
    return RunCluster(config.cluster, tell)


def check_cluster(cluster: ClusterConfig, tell: Tell) -> str:
    """Connect to the cluster of a run, or check the GPUs of this machine, without changing anything (--dry-run).

    Returns what the run would start, as "2 ranks on this machine".

    A cluster that the run would start is not checked. Raises ClusterNotFound or ClusterError as the run would.
    """
    if cluster.is_embedded:
        return f"{counted(local_resources(cluster, os.environ).ranks, 'rank')} on this machine"
    if not cluster.is_attached:
        return f"a cluster with backend {cluster.backend}, and {_ranks(cluster)} on it"
    target = AttachedCluster(cluster).connect()
    from ddptrain.driver.connect import connected  # imports Dask

    timeout_s = cluster.start_timeout_s if target.name else min(cluster.start_timeout_s, _APPEAR_S)
    connected(target, timeout_s, tell).close(timeout=2.0)
    return f"{_ranks(cluster)} on {target.name or target.address}"


def _ranks(cluster: ClusterConfig) -> str:
    if isinstance(cluster.ranks, int):
        return counted(cluster.ranks, "rank")
    return "a rank for each slot" if cluster.ranks == "auto" else f"{cluster.ranks.min} to {cluster.ranks.max} ranks"


@dataclass(frozen=True, slots=True)
class SharedRun:
    """The parts that a command with several runs gives to each run, so that the run neither creates nor closes them.

    signals: called with the run's inbox; returns its signals. mutex: held while workers of the cluster are replaced.
    """

    cluster: Cluster
    session: Session
    signals: Callable[[Inbox], Signals]
    mutex: threading.Lock
