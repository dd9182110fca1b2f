"""The part of `--dry-run` beyond the configuration: checks that the cluster of the run can be used."""

from __future__ import annotations

import os
from collections.abc import Callable

from ddptrain.clusters.backends.attached import AttachedCluster
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.driver.local_resources import local_resources

_APPEAR_S = 5.0  # for a foreign scheduler to answer; a run waits for cluster.start_timeout_s


def check_cluster(cluster: ClusterConfig, tell: Callable[[str], None]) -> None:
    """Connect to the cluster of the run, or check the GPUs of this machine; nothing is changed.

    A cluster that would be started for the run is not checked. Raises ClusterNotFound or ClusterError as the run would.
    """
    if cluster.is_embedded:
        local_resources(cluster, os.environ)
    if not cluster.is_attached:
        return
    target = AttachedCluster(cluster).connect()
    from ddptrain.driver.connect import connected  # imports Dask

    timeout_s = cluster.start_timeout_s if target.name else min(cluster.start_timeout_s, _APPEAR_S)
    connected(target, timeout_s, tell).close(timeout=2.0)
