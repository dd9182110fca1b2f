"""The check of a cluster without a run: `ddptrain cluster check`."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddptrain.clusters.backends.attached import AttachedCluster
from ddptrain.clusters.backends.embedded import EmbeddedCluster
from ddptrain.clusters.compatibility import Needs
from ddptrain.clusters.compatibility import check_cluster as check_versions
from ddptrain.clusters.provider import Cluster, Tell
from ddptrain.clusters.resolve import Target
from ddptrain.clusters.scheduler import slots
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.driver.cluster_check.check import HostCheck, Report
from ddptrain.driver.cluster_check.probe_plan import DEPTHS
from ddptrain.driver.connect import connected
from ddptrain.driver.control.signals import Signals
from ddptrain.driver.local_resources import local_resources
from ddptrain.driver.worker_group.reservation import SlotRequest, WaitHooks
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.errors import ClusterError


def check_cluster(
    config: ClusterConfig, depth: str, env: Mapping[str, str], tell: Tell, signals: Signals, *, exclude_bad: bool
) -> Report:
    """Check the hosts of a cluster that is up, or this machine, with all of its free slots.

    `env`: environment variables of the measuring ranks. Raises ClusterError, ClusterNotFound and Interrupted.
    """
    with ExitStack() as stack:
        cluster = _opened(config, stack)
        with signals.interrupting():
            target = cluster.connect()
            client = stack.enter_context(connected(target, config.start_timeout_s, tell))
            run_id = f"check-{uuid.uuid4().hex[:8]}"
            worker_group = stack.enter_context(WorkerGroup(client, run_id, signals.inbox, foreign=target.foreign))
            worker_group.subscribe()
            others, is_full = _in_use(worker_group)
            free_now = SlotRequest(None, False, config.start_timeout_s, 0.0, least=1)
            places = [] if is_full else worker_group.reserve(free_now, _hooks(worker_group, cluster, target, tell))
            check = HostCheck(worker_group, DEPTHS[depth], env, signals.check, config.gpus != 0)
            reserved = {place.slot.host for place in places}
            report = check.run(places, {host: runs for host, runs in others.items() if host not in reserved})
            return check.without_bad(report, places) if exclude_bad and report.bad else report


def _opened(config: ClusterConfig, stack: ExitStack) -> Cluster:
    if not config.is_embedded:
        return AttachedCluster(config)
    machine = local_resources(config, os.environ)
    # Below the working directory, where `ddptrain train` has its runs: that disk is checked.
    parent = os.getcwd() if os.access(".", os.W_OK | os.X_OK) else None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".ddptrain-check-", dir=parent))
    cluster = EmbeddedCluster(machine.ranks, machine.gpus, Path(folder) / "scratch", os.environ)
    stack.callback(cluster.close)
    cluster.begin()
    return cluster


def _in_use(worker_group: WorkerGroup) -> tuple[Mapping[str, tuple[str, ...]], bool]:
    """Return the hosts whose slots are all in use, with the runs that use them, and whether these are all hosts.

    Raises ClusterError if runs wait for slots, because the check must not use the slots before them.
    """
    overview: dict[str, Any] = worker_group.client.run_on_scheduler(slots.overview)
    if overview["waiting"]:
        names = ", ".join(str(run["run_id"]) for run in overview["waiting"])
        raise ClusterError(f"the free slots are for runs that wait for them ({names}): check the cluster later")
    free: dict[str, int] = {}
    for worker in overview["workers"]:
        free[worker["host"]] = free.get(worker["host"], 0) + worker["slots"] - worker["held"]
    full = {
        host: tuple(str(run["run_id"]) for run in overview["runs"] if host in run["hosts"])
        for host, count in free.items()
        if count <= 0
    }
    return full, bool(full) and len(full) == len(free)


def _hooks(worker_group: WorkerGroup, cluster: Cluster, target: Target, tell: Tell) -> WaitHooks:
    needs = Needs("ddptrain:", ())
    return WaitHooks(
        check=(lambda workers: check_versions(worker_group.client, workers, needs)) if target.foreign else None,
        worker_fault=cluster.worker_fault,
        last_words=cluster.last_words,
        tell=tell,
        cluster=target.name,
        fixed=target.fixed,
    )
