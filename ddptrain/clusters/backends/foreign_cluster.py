"""What all clusters have in common whose workers somebody else's code starts: Cluster classes, Saturn."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddptrain.clusters import status
from ddptrain.clusters.resolve import of_deployment
from ddptrain.clusters.scheduler.process import ENDED_FILE
from ddptrain.clusters.state import Deployment
from ddptrain.errors import ClusterError, DdptrainError, UsageError
from ddptrain.file_ops import write_atomic

_ASK_S = 5.0
_SURE_S = 15.0  # a scheduler on a busy machine answers late, and without its answer nothing can be scaled


def spare_runs(cluster: Deployment, slots: int) -> None:
    """Refuse to shrink a cluster that is in use: which workers go is not for us to choose.

    Raises: UsageError; ClusterError where its scheduler does not tell
    """
    view = status.probe(cluster, _SURE_S)
    if view.state != status.State.UP:
        raise ClusterError(f"which runs are on the cluster {cluster.name} can't be told: {view.reason}")
    runs = ", ".join(run.run_id for run in view.runs)
    if runs and slots < view.slots:
        raise UsageError(
            f"the cluster {cluster.name} is in use by {runs}, and its backend may end the very workers that these are "
            f"on: wait for their end before it gets fewer than {view.slots} slots"
        )


def dask_logs(cluster: Deployment, lines: int) -> dict[str, str]:
    """The last lines that Dask keeps of the scheduler and of each worker; nothing where they can't be asked."""
    if not cluster.record.address or cluster.ended:
        return {}
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # of a scheduler that is gone we tell otherwise
    try:
        return asyncio.run(asyncio.wait_for(_dask_logs(cluster, lines), _ASK_S))
    except (OSError, TimeoutError, DdptrainError):
        return {}


async def _dask_logs(cluster: Deployment, lines: int) -> dict[str, str]:
    from distributed import rpc

    target = of_deployment(cluster)
    how = target.security.get_connection_args("client") if target.security else None
    async with rpc(target.address, connection_args=how, timeout=_ASK_S) as scheduler:
        of_scheduler, of_workers, told = await asyncio.gather(
            scheduler.get_logs(n=lines), scheduler.worker_logs(n=lines), scheduler.identity(n_workers=-1)
        )
    names = {address: worker["name"] for address, worker in told["workers"].items()}
    logs = {"scheduler": of_scheduler, **{f"worker {names.get(each, each)}": log for each, log in of_workers.items()}}
    return {source: _text(log, lines) for source, log in logs.items()}


def _text(entries: Sequence[tuple[str, str]], lines: int) -> str:
    """Of (level, message), the newest first."""
    written = "\n".join(message for _, message in reversed(entries)).splitlines()
    return "".join(f"{line}\n" for line in written[-lines:])


def write_ended(folder: Path, reason: str, **more: bool) -> None:
    """Leave word in a cluster's folder of why it has ended by itself."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / ENDED_FILE, {"reason": reason, "at": now, **more})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file that only this user may read, at once."""
    write_atomic(path, json.dumps(data).encode(), mode=0o600, durable=False)
