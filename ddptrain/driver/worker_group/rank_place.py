"""Where one rank of an attempt runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.clusters.scheduler import slots
from ddptrain.host_identity import file_view


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs.

    scratch: the worker's folder. shared: whether the driver sees that folder, too. gpu: the slot's device, as an entry
    of CUDA_VISIBLE_DEVICES; "" on the CPU. same_files: the worker sees all files as the driver does.
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
    same_files: bool = False

    @property
    def host(self) -> str:
        """The host's name and, if that is another one, its address in the cluster."""
        known = self.slot.host
        return self.hostname if known in {self.hostname, "127.0.0.1", "::1"} else f"{self.hostname} ({known})"


def rank_places(
    chosen: Sequence[slots.Slot], about: Mapping[str, Mapping[str, str]], shared: Mapping[str, bool]
) -> list[RankPlace]:
    """Return the places of the ranks 0, 1, ... in these slots.

    about: the description of each worker's host. shared: whether each worker sees the driver's files.
    """
    hosts = {host: number for number, host in enumerate(dict.fromkeys(slot.host for slot in chosen))}
    size = Counter(slot.host for slot in chosen)
    local_ranks: Counter[str] = Counter()
    places, view = [], file_view()
    for rank, slot in enumerate(chosen):
        of_worker = about[slot.worker]
        gpus = of_worker["gpus"].split(",")
        places.append(
            RankPlace(
                rank=rank,
                local_rank=local_ranks[slot.host],
                local_world_size=size[slot.host],
                node_rank=hosts[slot.host],
                slot=slot,
                hostname=of_worker["hostname"],
                scratch=Path(of_worker["scratch"]),
                shared=shared[slot.worker],
                gpu=gpus[slot.index] if slot.index < len(gpus) else "",
                same_files=of_worker.get("files", "") == view != "",
            )
        )
        local_ranks[slot.host] += 1
    return places
