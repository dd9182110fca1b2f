"""The slots of this machine: how many there are, and which ones this user's runs hold that use no cluster.

Each such run has a file, which its driver locks for as long as it lives: one that was killed holds nothing. Runs wait
in the order of clusters/scheduler/slots.py.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from platformdirs import user_state_path

from ddptrain.config.sections.clusters import ClusterConfig, RankRange
from ddptrain.errors import ClusterError
from ddptrain.file_ops import CREATE, make_private, open_regular, try_lock, wait_for_lock, write_all
from ddptrain.gpus import default_slots, usable_cores, visible_gpus

if TYPE_CHECKING:
    from ddptrain.clusters.scheduler.slots import Refusal

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class LocalResources:
    """The number of slots; `gpus` has an entry for CUDA_VISIBLE_DEVICES for each slot, none on the CPU.

    present: all GPUs from which they were chosen.
    """

    ranks: int
    gpus: tuple[str, ...]
    present: tuple[str, ...] = field(default=(), compare=False)


def local_resources(cluster: ClusterConfig, environ: Mapping[str, str]) -> LocalResources:
    """Return slots and GPUs for a configuration. Raises ClusterError if there are fewer GPUs than it asks for."""
    present = () if cluster.gpus == 0 else visible_gpus(environ)
    wanted = len(present) if cluster.gpus == "auto" else int(cluster.gpus)
    if wanted > len(present):
        raise ClusterError(
            f"cluster.gpus is {wanted}, but this machine has {len(present)}: set it to auto, or to 0 for the CPU"
        )
    count = cluster.slots or default_slots(present[:wanted])
    if isinstance(cluster.ranks, RankRange) and wanted:
        count = max(cluster.ranks.min, min(count, wanted))
    if wanted and count > wanted:
        raise ClusterError(
            f"cluster.ranks is {count}, but there are {wanted} GPUs, one a rank: ask for fewer ranks, or set "
            "cluster.gpus to 0 to train on the CPU"
        )
    return LocalResources(count, present[: min(count, wanted)], present if wanted else ())


def crowding(resources: LocalResources, cores: int) -> str:
    """Return a warning about more ranks on the CPU than the default and than cores, or ""."""
    most = max(default_slots(()), cores)
    if resources.gpus or resources.ranks <= most:
        return ""
    shared = "share 1 core" if cores == 1 else f"share {cores} cores"
    return f"{resources.ranks} ranks {shared}: their start and each step take longer; --ranks {most} may be faster"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a run holds, or waits for, since a time in seconds since 1970; no `gpus`: slots on the CPU."""

    run_id: str
    count: int
    gpus: tuple[str, ...]
    priority: int
    since: float
    holds: bool = False

    @property
    def order(self) -> tuple[int, float]:
        """The first in line has the lowest."""
        return -self.priority, self.since


class MachineSlots:
    """The claim of one run."""

    def __init__(self, run_id: str, present: Sequence[str]) -> None:
        """present: the GPUs of this machine that the run may use; none for a run on the CPU."""
        self._present = present
        self._total = len(present) or max(default_slots(()), usable_cores())
        self._folder = user_state_path("ddptrain", appauthor=False) / "machine" / socket.gethostname()
        self._run_id = run_id
        # The id of a run is unique in its folder of runs only.
        self._path = self._folder / f"{run_id}-{os.urandom(4).hex()}{_SUFFIX}"
        self._since = time.time()
        self._file = -1

    def claim(
        self, count: int, gpus: tuple[str, ...], priority: int = 0, *, in_line: bool
    ) -> tuple[str, ...] | Refusal:
        """Return the GPUs of the run once it holds its slots, or, with `in_line`, why it has to wait.

        gpus: those that it gets if no other run holds them, or if the free ones are too few and it does not wait; ()
        for slots on the CPU. A run that needs more than the machine has waits until it has all. Raises OSError.
        """
        own = Claim(self._run_id, count, gpus, priority, self._since)
        with self._locked():
            others = [each for each in self._others() if bool(each.gpus) == bool(gpus)]
            holding = [each for each in others if each.holds]
            taken = {gpu for each in holding for gpu in each.gpus}
            left = [gpu for gpu in self._present if gpu not in taken]
            free = len(left) if gpus else max(0, self._total - sum(each.count for each in holding))
            ahead = sum(each.order < own.order for each in others if not each.holds)
            asked = min(count, self._total)
            if in_line and (ahead or free < asked):
                self._write(own)
                return self._refusal(asked, free, ahead + 1, holding)
            chosen = tuple(left[:count]) if not taken.isdisjoint(gpus) and len(left) >= count else gpus
            self._write(replace(own, gpus=chosen, since=time.time(), holds=True))
            return chosen

    def release(self) -> None:
        """Give the slots back."""
        if self._file >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = -1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other drivers from changing their claims."""
        make_private(self._folder)
        lock = open_regular(self._folder / "lock", CREATE)
        try:
            wait_for_lock(lock)
            yield
        finally:
            os.close(lock)

    def _others(self) -> list[Claim]:
        """Return the claims of drivers that live; delete the others."""
        found = []
        for path in [path for path in self._folder.glob(f"*{_SUFFIX}") if path != self._path]:
            with suppress(FileNotFoundError, ValueError, TypeError):  # released just now, or of another version
                file = open_regular(path, os.O_RDWR)
                try:
                    if try_lock(file):
                        path.unlink()
                    else:
                        raw = json.loads(path.read_bytes())
                        found.append(Claim(**{**raw, "gpus": tuple(raw["gpus"])}))
                finally:
                    os.close(file)
        return found

    def _write(self, claim: Claim) -> None:
        if self._file < 0:
            self._file = open_regular(self._path, CREATE)
            wait_for_lock(self._file)
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        write_all(self._file, json.dumps(asdict(claim)).encode())

    def _refusal(self, asked: int, free: int, place: int, holding: list[Claim]) -> Refusal:
        from ddptrain.clusters.scheduler.slots import Refusal  # imports Dask

        holders = tuple((each.run_id, each.count, each.since) for each in sorted(holding, key=lambda each: each.since))
        return Refusal(asked, free, self._total, place, holders, {socket.gethostname(): self._total}, self._total)
