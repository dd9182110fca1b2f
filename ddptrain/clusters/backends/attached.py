"""A Dask cluster that is already up. The run uses it and does not end it."""

from __future__ import annotations

from pathlib import Path

from ddptrain.clusters import resolve
from ddptrain.clusters.provider import Cluster
from ddptrain.clusters.resolve import Target
from ddptrain.config.sections.clusters import ClusterConfig


class AttachedCluster(Cluster):
    """The cluster that a configuration names: one of the user's own, an address, or a scheduler's file."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    @property
    def description(self) -> str:
        """What it is, for messages."""
        config = self.config
        return f"the cluster {config.name}" if config.name else str(config.address or config.scheduler_file)

    def connect(self) -> Target:
        """Return the address to connect to; the caller checks that a scheduler answers. Raises ClusterError."""
        if self.config.name is not None:
            return resolve.by_name(self.config.name)
        if self.config.address is not None:
            return resolve.by_address(self.config.address, self.config.tls)
        return resolve.by_scheduler_file(Path(str(self.config.scheduler_file)).expanduser(), self.config.tls)

    def last_words(self) -> str:
        """Return the last log lines of the workers of the user's own cluster; empty for other clusters."""
        if self.config.name is None:
            return ""
        from ddptrain.clusters import lifecycle

        return lifecycle.last_words(self.config.name)
