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

_AGAIN_S = 60.0


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
    failed = ""
    while True:  # its machines cost money until it is closed
        try:
            saturn.close(cluster, print)
            break
        except DdptrainError as error:
            if str(error) != failed:
                print(failed := str(error), flush=True)
        time.sleep(_AGAIN_S)
    write_ended(cluster.folder, f"idle for {timeout_s:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
