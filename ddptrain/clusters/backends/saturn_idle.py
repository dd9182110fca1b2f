"""`python -m ddptrain.clusters.backends.saturn_idle`: closes a cluster in Saturn after its idle time.

    python -P -m ddptrain.clusters.backends.saturn_idle --name NAME

It needs SATURN_TOKEN, and writes the result to ended.json in the cluster's folder.
"""

from __future__ import annotations

import argparse
import sys
import time

from ddptrain.clusters import cluster_records
from ddptrain.clusters.backends import saturn
from ddptrain.clusters.resolve import of_deployment
from ddptrain.clusters.scheduler.idle_time import IdleWatch
from ddptrain.clusters.scheduler.scheduler_process import write_ended
from ddptrain.errors import DdptrainError


def main(argv: list[str] | None = None) -> int:
    """Watch until the cluster has been idle for too long."""
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain.clusters.backends.saturn_idle", description="Ends a cluster that nobody uses."
    )
    parser.add_argument("--name", required=True, help="the cluster's name")
    cluster = cluster_records.find(parser.parse_args(argv).name)
    timeout_s = cluster.record.idle_timeout_s
    watch = IdleWatch(of_deployment(cluster), timeout_s)
    while not watch.is_over():
        time.sleep(watch.pause_s)
    reason = f"idle for {timeout_s:g} s"
    try:
        saturn.close(cluster, print)
    except DdptrainError as error:
        reason = f"{reason}, but it may still run: {error}"
    write_ended(cluster.folder, reason)
    return 0


if __name__ == "__main__":
    sys.exit(main())
