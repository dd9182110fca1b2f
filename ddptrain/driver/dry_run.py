"""What `--dry-run` checks beyond the configuration: that the cluster which the run would use is there."""

from __future__ import annotations

import os
from collections.abc import Callable

from ddptrain.clusters.backends.attached import AttachedCluster
from ddptrain.config.models import ClusterConfig
from ddptrain.driver.local_resources import offer

_APPEAR_S = 5.0  # for a scheduler of others to appear; a run waits for cluster.start_timeout_s


def check_cluster(cluster: ClusterConfig, tell: Callable[[str], None]) -> None:
    """Connect to the cluster that a run would use and leave it as it is; of this machine, look whether it has the GPUs.

    A cluster that would be started for the run is not checked.

    Raises: ClusterNotFound, ClusterError, as the run would.
    """
    if cluster.is_embedded:
        offer(cluster, os.environ)
    if not cluster.is_attached:
        return
    target = AttachedCluster(cluster).connect()
    from ddptrain.driver.connect import connected  # imports Dask

    timeout_s = cluster.start_timeout_s if target.name else min(cluster.start_timeout_s, _APPEAR_S)
    connected(target, timeout_s, tell).close(timeout=2.0)
