"""What the driver needs of a cluster, and what the commands need of whoever starts clusters that outlive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ddptrain.clusters.resolve import Target
    from ddptrain.clusters.state import Deployment

Tell = Callable[[str], None]


class Cluster(Protocol):
    """A Dask cluster with slots for ranks, for the length of a run."""

    @property
    def words(self) -> str:
        """What it is, for messages."""

    def begin(self) -> None:
        """Start what takes long, and return at once."""

    def connect(self) -> Target:
        """Where the scheduler answers. Raises ClusterError."""

    def worker_fault(self) -> str | None:
        """What became of a worker that this object started, if it has ended."""

    def mend(self, *, leaving: bool) -> None:
        """Start again what this object had started, and what has ended by itself, or is about to (`leaving`)."""

    def last_words(self) -> str:
        """The last lines of the workers' logs, where they can be had: for the error that too few have come."""

    def close(self) -> None:
        """End what this object has started; an attached cluster is left as it was found."""


class Provider(Protocol):
    """Starts, changes and ends the processes, jobs or pods of one cluster, which outlives the command."""

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Order what is missing for `slots` slots (None: what the settings say), or end what is too much.

        The scheduler comes first where there is none. Every process or job is saved in the deployment the moment it
        exists. Does not wait for workers to join. Raises ClusterError, UsageError.
        """

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """The last lines that each process has written, by source, also of those that have failed."""

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """End all that `scale` has started, also by half, and return when it has ended. Raises ClusterError."""
