"""The clusters of a run that are not embedded: one that is already up, and one that is started for the run."""

from __future__ import annotations

import secrets

from ddptrain.clusters import lifecycle, resolve
from ddptrain.clusters.provider import Cluster, Tell
from ddptrain.clusters.resolve import Target
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.errors import ClusterError

# If the driver is killed, the cluster ends by itself after this time.
_IDLE_TIMEOUT_S = 300.0


class AttachedCluster(Cluster):
    """The cluster that a configuration names: one of the user's own, an address, or a scheduler's file."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    @property
    def description(self) -> str:
        """What it is, for messages."""
        config = self.config
        return f"the cluster {config.name}" if config.name else str(config.address)

    def connect(self) -> Target:
        """Return the address to connect to; the caller checks that a scheduler answers. Raises ClusterError."""
        if self.config.name is not None:
            return resolve.by_name(self.config.name)
        return resolve.by_address(str(self.config.address))

    def last_words(self) -> str:
        """Return the last log lines of the workers of the user's own cluster; empty for other clusters."""
        return lifecycle.last_words(self.config.name) if self.config.name else ""


class RunCluster(Cluster):
    """A cluster that `ddptrain cluster status` shows as run-<hex> for as long as its run lasts."""

    def __init__(self, config: ClusterConfig, tell: Tell) -> None:
        idle_timeout_s = config.idle_timeout_s or _IDLE_TIMEOUT_S
        self.config = config.model_copy(update={"idle_timeout_s": idle_timeout_s})
        self.name = f"run-{secrets.token_hex(4)}"
        self._tell = tell
        self._is_up = False

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return f"a cluster of backend {self.config.backend}"

    def connect(self) -> Target:
        """Start the cluster. Raises ClusterError or UsageError; nothing of the cluster is left then."""
        self._tell(f"starting {self.description}")
        view = lifecycle.up(self.config, self.name, self._tell)
        self._is_up = True
        return resolve.of_cluster(view.cluster)

    def last_words(self) -> str:
        """Return the last log lines of its processes."""
        return lifecycle.last_words(self.name)

    def close(self) -> None:
        """End the cluster, even with runs on it."""
        if not self._is_up:
            return
        try:
            lifecycle.down(self.name, self._tell, now=True)
        except ClusterError as error:
            self._tell(f"{error}; try again with `ddptrain cluster down {self.name}`")
