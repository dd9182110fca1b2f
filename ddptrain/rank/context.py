"""What a workload sees of ddptrain: where it is, and how to log, report progress, save and resume."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ddptrain import events
from ddptrain.rank import checkpoint
from ddptrain.rank.emitter import Emitter
from ddptrain.spec import RankSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed run goes on: `step` and `epoch` are those of the checkpoint, `data` the extra state saved."""

    step: int
    epoch: float | None
    data: Mapping[str, Any]


class RankContext:
    """A rank's view of its run; the process group is up while a workload holds one."""

    def __init__(self, spec: RankSpec, emitter: Emitter, device: torch.device) -> None:
        self._spec = spec
        self._emitter = emitter
        self._counter = itertools.count()
        self.device = device

    @property
    def run_id(self) -> str:
        """The run's name in the runs folder."""
        return self._spec.run_id

    @property
    def attempt(self) -> int:
        """Which try of the run this is, from 1."""
        return self._spec.attempt

    @property
    def rank(self) -> int:
        """This process among all of the run, 0 to world_size - 1."""
        return self._spec.rank

    @property
    def world_size(self) -> int:
        """How many ranks the run has."""
        return self._spec.world_size

    @property
    def local_rank(self) -> int:
        """This process among the run's ranks on its host."""
        return self._spec.local_rank

    @property
    def local_world_size(self) -> int:
        """How many of the run's ranks are on this host."""
        return self._spec.local_world_size

    @property
    def node_rank(self) -> int:
        """This host among the run's hosts."""
        return self._spec.node_rank

    def log(
        self, values: Mapping[str, float | torch.Tensor], *, step: int | None = None, epoch: float | None = None
    ) -> None:
        """Log numbers to metrics.jsonl, as this rank's. Tensors of one element are read (which waits for the device).

        Raises:
            TypeError: a value is not a number, or `step` is not an integer.
        """
        numbers = {str(name): _number(name, value) for name, value in values.items()}
        self._emitter.emit(events.Metrics(time.time_ns(), numbers, _integer("step", step), _optional("epoch", epoch)))

    def progress(self, done: float, total: float | None = None, *, unit: str = "samples") -> None:
        """Tell how far this rank is, in `unit`; cheap enough for every step (ten a second are sent)."""
        self._emitter.progress(done, total, unit)

    def save_file(self, path: str, data: bytes | str | Path) -> None:
        """Hand over a file for artifacts/`path` in the run directory: bytes, text (UTF-8), or a Path to copy from.

        Raises:
            ValueError: the path would leave the run directory.
            OSError: the file can't be read, or the staging disk is full.
        """
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or path.startswith("/"):  # the driver checks again, and more strictly
            raise ValueError(f"ctx.save_file takes a path below artifacts/, such as 'samples/a.txt', not {path!r}")
        staged = self._new_staging("file")
        if isinstance(data, Path):
            shutil.copyfile(data, staged)
        else:
            staged.write_bytes(data.encode() if isinstance(data, str) else data)
        size, digest = checkpoint.hash_file(staged)
        self._emitter.emit(events.FileSaved(time.time_ns(), str(path), staged.name, size, digest))

    def checkpoint(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int,
        epoch: float | None = None,
        metrics: Mapping[str, float | torch.Tensor] | None = None,
        last: bool = False,
        **more: Any,
    ) -> bool:
        """Save a checkpoint and hand it over; every rank calls it, rank 0 writes. Returns whether one was due.

        With `epoch` (counted from 1) given, `checkpoint.every_epochs` decides; `last` always saves. `more` is anything
        with state_dict(), or plain data: numbers, text, lists, dictionaries, tensors. DDP's wrapper is taken off.

        Raises:
            TypeError: something can't be saved in a form that loads without executing a pickle.
        """
        every = self._spec.every_epochs
        if not (last or epoch is None or (every is not None and int(epoch) % every == 0)):
            return False
        if self.rank == 0:
            folder = self._new_staging("checkpoint")
            numbers = {str(name): _number(name, value) for name, value in (metrics or {}).items()}
            files = checkpoint.write(folder, model, optimizer, step=step, epoch=epoch, metrics=numbers, more=more)
            self._emitter.emit(
                events.CheckpointSaved(
                    time.time_ns(), int(step), folder.name, files, _optional("epoch", epoch), numbers
                )
            )
        return True

    def resume(self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Resumed | None:
        """Load the state to go on from into `model` and `optimizer`; None where there is nothing to resume."""
        if not self._spec.resume_from:
            return None
        state = checkpoint.read(Path(self._spec.resume_from), model, optimizer, self.device)
        return Resumed(state["step"], state["epoch"], state["extra"])

    def _new_staging(self, kind: str) -> Path:
        return Path(self._spec.staging) / f"{kind}-{next(self._counter)}"


def _number(name: object, value: Any) -> float:
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise TypeError(f"ctx.log and metrics take numbers: {name!r} is {value!r} ({type(value).__name__})")
    return item


def _integer(name: str, value: Any) -> int | None:
    number = None if value is None else _number(name, value)
    if number is not None and int(number) != number:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return None if number is None else int(number)


def _optional(name: str, value: Any) -> float | None:
    return None if value is None else _number(name, value)
