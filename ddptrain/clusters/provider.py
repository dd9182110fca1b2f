"""The interfaces of backends: `Cluster` for the driver, `Provider` for the commands `ddptrain cluster ...`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ddptrain.clusters.cluster_records import Deployment
    from ddptrain.clusters.resolve import Target

Tell = Callable[[str], None]


class Cluster(Protocol):
    """A Dask cluster with slots for ranks, during one run. What a subclass leaves out does nothing."""

    @property
    def description(self) -> str:
        """The name of the cluster for messages."""

    def begin(self) -> None:
        """Start everything that takes long, without waiting for it."""
        return

    def connect(self) -> Target:
        """Start the processes that do not run yet; return the scheduler's address. Raises ClusterError."""

    def worker_fault(self) -> str | None:
        """Return why a worker that this object has started has ended; None while all run."""
        return None

    def replace_workers(self, *, leaving: bool) -> None:
        """Replace workers of this object that have ended or will end soon (`leaving`)."""
        return

    def last_words(self) -> str:
        """Return the last log lines of the workers, if available: for the error that too few workers have joined."""
        return ""

    def close(self) -> None:
        """End everything that this object has started; an attached cluster keeps running."""
        return


class Provider(Protocol):
    """Starts, scales and ends the processes, jobs or pods of a cluster that outlives the command.

    Optional: `fault(cluster)` returns why a part of the cluster has ended or will never run, or None.
    `reopen(cluster)` restores the connection of this host to the scheduler. `tls`: whether the cluster uses TLS by
    default; None: the backend decides.
    """

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Start workers for `slots` slots (None: as configured), or end workers that are too many.

        A missing scheduler is started first. Each process or job is saved in the deployment as soon as it exists. Does
        not wait for workers to join. Raises ClusterError, UsageError.
        """

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """Return the last log lines of each process, by source, also of failed ones."""

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """End everything that `scale` has started, even partly, and wait for its end. Raises ClusterError."""
