"""How many trials may run at the same time: as configured, or as many as there are free slots."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ddptrain.clusters.scheduler import slots
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.sweeping import SweepConfig
from ddptrain.driver.cluster_session import LocalResources
from ddptrain.errors import UsageError
from ddptrain.gpus import usable_cores, visible_gpus
from ddptrain.log import Log

if TYPE_CHECKING:
    from distributed import Client

_LOOK_EVERY_S = 1.0
_log = Log(__name__)


def local_slots(config: RunConfig, sweep: SweepConfig, ranks: int) -> LocalResources:
    """Return the slots of the embedded cluster of a sweep. Raises UsageError if there are too few GPUs."""
    present = () if config.cluster.gpus == 0 else visible_gpus(os.environ)
    n_gpus = len(present) if config.cluster.gpus == "auto" else min(int(config.cluster.gpus), len(present))
    units = n_gpus or usable_cores()
    parallel = max(1, units // ranks) if sweep.parallel == "auto" else sweep.parallel
    count = parallel * ranks
    if config.cluster.gpus not in ("auto", 0) and n_gpus < int(config.cluster.gpus):
        raise UsageError(f"cluster.gpus is {config.cluster.gpus}, but this machine has {n_gpus}: set it to auto")
    if n_gpus and count > n_gpus:
        raise UsageError(
            f"{parallel} trials of {ranks} ranks at the same time need {count} GPUs, and there are {n_gpus}: lower "
            "sweep.parallel or sweep.ranks, or set cluster.gpus to 0 to train on the CPU"
        )
    return LocalResources(count, present[:count] if n_gpus else ())


class Capacity:
    """Counts the free slots of a cluster that other runs use too, at most once a second."""

    def __init__(self, most: int | None, ranks: int, client: Client | None) -> None:
        """Most trials at a time, and where free slots are counted.

        most: the largest number of trials; None for no limit. client: None if the cluster is this sweep's own and has
        slots for `most` trials.
        """
        self._most, self._ranks, self._client = most, ranks, client
        self._looked_at = 0.0
        self._found = 1

    def trials(self, running: int) -> int:
        """Return how many trials may run at the same time; at least 1, which waits for its slots.

        A trial that is started without free slots would fail after cluster.wait_s, also if trials of its own sweep
        have the slots.
        """
        if self._client is None:
            return self._most or 1
        free_trials = self._free_trials(self._client, running)
        return free_trials if self._most is None else min(free_trials, self._most)

    def _free_trials(self, client: Client, running: int) -> int:
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return self._found
        try:
            overview = client.run_on_scheduler(slots.overview)
        except Exception as error:  # Dask raises any type while a connection breaks; the trials report that
            _log.info("free slots are not known", reason=error)
            return self._found
        self._looked_at = time.monotonic()
        free = sum(worker["slots"] - worker["held"] for worker in overview["workers"])
        before, self._found = self._found, 1 if overview["waiting"] else max(1, running + free // self._ranks)
        if before != self._found:
            _log.info("capacity", trials=self._found, free_slots=free, waiting=len(overview["waiting"]))
        return self._found

    def started(self) -> None:
        """Count a started trial, whose slots may not be reserved yet at the next count of free slots."""
        self._looked_at = time.monotonic()
