"""What the driver needs of a cluster, whatever is beneath."""

from __future__ import annotations

from typing import Protocol


class Cluster(Protocol):
    """A Dask cluster with slots for ranks."""

    def begin(self) -> None:
        """Start what takes long, and return at once."""

    def connect(self) -> str:
        """The scheduler's address, once it answers. Raises ClusterError."""

    def worker_fault(self) -> str | None:
        """What became of a worker that this object started, if it has ended."""

    def close(self) -> None:
        """End what this object has started; an attached cluster is left as it was found."""
