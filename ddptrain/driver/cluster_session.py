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
from ddptrain.clusters.provider import Cluster, Tell
from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.config.wording import counted
from ddptrain.driver.local_resources import LocalResources, local_resources
from ddptrain.protocol.exec_env import without_working_directory

if TYPE_CHECKING:
    from distributed import Client

    from ddptrain.clusters.resolve import Target
    from ddptrain.driver.control.signals import Signals
    from ddptrain.driver.display.run_display import RunDisplay
    from ddptrain.driver.inbox import Inbox
    from ddptrain.driver.workers import ClusterNews

_APPEAR_S = 5.0  # time for a foreign scheduler to answer a dry run; a run waits for cluster.start_timeout_s


def cluster_for(config: RunConfig, machine: LocalResources | None, scratch: Path, tell: Tell) -> Cluster:
    """Return the cluster that a configuration names, which is not started yet.

    `machine` are the resources of the embedded cluster, None for other clusters.
    """
    if machine is not None:
        environ = without_working_directory(os.environ) if is_built_in(config.workload) else os.environ
        return EmbeddedCluster(machine.ranks, machine.gpus, scratch, environ)
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
class Session:
    """A connected client, its scheduler, and the scheduler's messages about workers."""

    client: Client
    target: Target
    news: ClusterNews


@dataclass(frozen=True, slots=True)
class SharedRun:
    """The parts that a command with several runs gives to each run, so that the run does not create them.

    signals: called with the run's inbox; returns its signals.
    """

    cluster: SharedCluster
    session: Session
    display: RunDisplay
    signals: Callable[[Inbox], Signals]


class SharedCluster:
    """A cluster that several runs use at the same time. The command that has opened it closes it."""

    def __init__(self, cluster: Cluster, target: Target) -> None:
        self._cluster, self._target = cluster, target
        self._mutex = threading.Lock()

    @property
    def description(self) -> str:
        """The name of the cluster for messages."""
        return self._cluster.description

    def begin(self) -> None:
        """Do nothing: the cluster is up."""

    def connect(self) -> Target:
        """Return the scheduler's address."""
        return self._target

    def worker_fault(self) -> str | None:
        """Return why a worker process of the command has ended; None while all are running."""
        return self._cluster.worker_fault()

    def replace_workers(self, *, leaving: bool) -> None:
        """Replace workers that have ended.

        A worker that is about to end stays, because other runs may be saving there.
        """
        with self._mutex:
            self._cluster.replace_workers(leaving=False)

    def last_words(self) -> str:
        """Return the last log lines of the workers; "" if there are none."""
        return self._cluster.last_words()

    def close(self) -> None:
        """Do nothing: other runs use the cluster."""
