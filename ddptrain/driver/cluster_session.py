"""The connection to a cluster: of one run, or shared by several runs of this process, each in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.clusters.backends.embedded import EmbeddedCluster
from ddptrain.clusters.backends.run_cluster import AttachedCluster, RunCluster
from ddptrain.clusters.provider import Cluster, Tell
from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.clusters import ClusterConfig, RankRange
from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError
from ddptrain.gpus import default_slots, visible_gpus
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


# --- the resources of this machine for an embedded cluster ---


@dataclass(frozen=True, slots=True)
class LocalResources:
    """The number of slots; `gpus` has an entry for CUDA_VISIBLE_DEVICES for each slot, none on the CPU.

    present: all GPUs from which they were chosen.
    """

    ranks: int
    gpus: tuple[str, ...]
    present: tuple[str, ...] = field(default=(), compare=False)


def local_resources(cluster: ClusterConfig, environ: Mapping[str, str]) -> LocalResources:
    """Return ranks and GPUs for a configuration. Raises ClusterError if there are fewer GPUs than it asks for."""
    present = () if cluster.gpus == 0 else visible_gpus(environ)
    wanted = len(present) if cluster.gpus == "auto" else int(cluster.gpus)
    if wanted > len(present):
        raise ClusterError(
            f"cluster.gpus is {wanted}, but this machine has {len(present)}: set it to auto, or to 0 for the CPU"
        )
    if cluster.ranks == "auto":
        return LocalResources(default_slots(present[:wanted]), present[:wanted], present)
    if isinstance(cluster.ranks, RankRange):
        most = min(cluster.ranks.max, wanted) if wanted else cluster.ranks.max
        return LocalResources(max(cluster.ranks.min, most), present[:most] if wanted else (), present if wanted else ())
    ranks = int(cluster.ranks)
    if wanted and ranks > wanted:
        raise ClusterError(
            f"cluster.ranks is {ranks}, but there are {wanted} GPUs, one a rank: ask for fewer ranks, or set "
            "cluster.gpus to 0 to train on the CPU"
        )
    return LocalResources(ranks, present[: ranks if wanted else 0], present if wanted else ())


def crowding(resources: LocalResources, cores: int) -> str:
    """Return a warning about more ranks on the CPU than the default and than cores, or ""."""
    most = max(default_slots(()), cores)
    if resources.gpus or resources.ranks <= most:
        return ""
    shared = "share 1 core" if cores == 1 else f"share {cores} cores"
    return f"{resources.ranks} ranks {shared}: their start and each step take longer; --ranks {most} may be faster"
