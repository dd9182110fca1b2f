"""Common functions of backends whose workers ddptrain does not start: Dask cluster classes and Saturn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ddptrain.clusters import status
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.resolve import of_deployment
from ddptrain.errors import ClusterError, DdptrainError, UsageError

_ASK_S = 5.0
_SURE_S = 15.0  # a scheduler on a busy machine answers late, and without its answer nothing can be scaled


def spare_runs(cluster: Deployment, slots: int) -> None:
    """Raise UsageError if runs use a cluster that would shrink, ClusterError if its scheduler does not answer."""
    view = status.probe(cluster, _SURE_S)
    if view.state != status.State.UP:
        raise ClusterError(f"can't find out which runs use the cluster {cluster.name}: {view.reason}; try again")
    runs = ", ".join(run.run_id for run in view.runs)
    if runs and slots < view.slots:
        raise UsageError(
            f"the cluster {cluster.name} is in use by {runs}, and its backend may end the very workers that these are "
            f"on: wait for their end before it gets fewer than {view.slots} slots"
        )


def dask_logs(cluster: Deployment, lines: int) -> dict[str, str]:
    """Return the last log lines that Dask keeps of scheduler and workers; empty if the scheduler does not answer."""
    if not cluster.record.address or cluster.ended:
        return {}
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # an unreachable scheduler is reported by the caller
    try:
        return asyncio.run(asyncio.wait_for(_dask_logs(cluster, lines), _ASK_S))
    except (OSError, TimeoutError, DdptrainError):
        return {}


async def _dask_logs(cluster: Deployment, lines: int) -> dict[str, str]:
    from distributed import rpc

    target = of_deployment(cluster)
    how = target.security.get_connection_args("client") if target.security else None
    async with rpc(target.address, connection_args=how, timeout=_ASK_S) as scheduler:
        of_scheduler, of_workers, overview = await asyncio.gather(
            scheduler.get_logs(n=lines), scheduler.worker_logs(n=lines), scheduler.identity(n_workers=-1)
        )
    names = {address: worker["name"] for address, worker in overview["workers"].items()}
    logs = {"scheduler": of_scheduler, **{f"worker {names.get(each, each)}": log for each, log in of_workers.items()}}
    return {source: _text(log, lines) for source, log in logs.items()}


def _text(entries: Sequence[tuple[str, str]], lines: int) -> str:
    """Return the messages of (level, message) pairs, of which the newest is the first, in the order of time."""
    written = "\n".join(message for _, message in reversed(entries)).splitlines()
    return "".join(f"{line}\n" for line in written[-lines:])
