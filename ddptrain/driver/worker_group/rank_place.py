"""Where one rank of an attempt runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddptrain.clusters.scheduler import slots


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs.

    scratch: the worker's folder. shared: whether the driver sees that folder, too. gpu: the slot's device, as an entry
    of CUDA_VISIBLE_DEVICES; "" on the CPU.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    slot: slots.Slot
    hostname: str
    scratch: Path
    shared: bool
    gpu: str = ""

    @property
    def host(self) -> str:
        """The host's name and, if that is another one, its address in the cluster."""
        known = self.slot.host
        return self.hostname if known in {self.hostname, "127.0.0.1", "::1"} else f"{self.hostname} ({known})"
