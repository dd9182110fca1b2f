"""What a workload sees of ddptrain: where it is, and how to log, report progress, save and resume."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.checkpoint import random_state
from ddptrain.rank.checkpoint.coordination import Calls, Due, GangStore, Preempted
from ddptrain.rank.checkpoint.load import Resumed, loaded
from ddptrain.rank.checkpoint.snapshot import HostBuffers, plain_bytes
from ddptrain.rank.checkpoint.writer import Save, Saver, done_key, state_key
from ddptrain.rank.collective.calls import GangCalls
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.files import Files
from ddptrain.rank.plainnumbers import number, optional, whole
from ddptrain.rank.trackers import Tracked

if TYPE_CHECKING:
    import torch
    import torch.utils.data

    from ddptrain.rank.collective.values import Exchange
    from ddptrain.rank.data.loader import GangLoader
    from ddptrain.rank.media.log import Showing

__all__ = ["Preempted", "RankContext", "Resumed"]


class RankContext:
    """A rank's view of its run; the process group is up while a workload holds one."""

    def __init__(
        self,
        spec: RankSpec,
        emitter: Emitter,
        device: torch.device,
        calls: Calls | None = None,
        tracked: Tracked | None = None,
        gang_calls: GangCalls | None = None,
    ) -> None:
        """`calls` counts those of checkpoint, and may be told to end before there is a context, as may `tracked`.

        `gang_calls` counts those of all methods that every rank must call.
        """
        self._spec = spec
        self._emitter = emitter
        self._files = Files(spec, emitter)
        self._tracked = tracked or Tracked(spec, emitter)
        self._calls = calls or Calls(spec, GangStore(spec))
        self._store = self._calls.store
        self._gang_calls = gang_calls or GangCalls(spec, emitter)
        self._due = Due(spec, self._store)
        self._buffers = HostBuffers()
        self._saver = Saver(spec, emitter, self._store, self._tracked.checkpoint)
        self._saves = 0
        self._loaders: list[GangLoader] = []
        self._places: list[dict[str, int]] = []  # where the loaders of a resumed run go on
        self._first_epoch = 1
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
        return self._spec.placement.world_size

    @property
    def local_rank(self) -> int:
        """This process among the run's ranks on its host."""
        return self._spec.placement.local_rank

    @property
    def local_world_size(self) -> int:
        """How many of the run's ranks are on this host."""
        return self._spec.placement.local_world_size

    @property
    def node_rank(self) -> int:
        """This host among the run's hosts."""
        return self._spec.placement.node_rank

    @property
    def inputs(self) -> Path | None:
        """The folder of what the driver has prepared for all ranks; None where the workload prepares nothing."""
        return Path(self._spec.code.inputs) if self._spec.code.inputs else None

    @property
    def preempted(self) -> bool:
        """Whether the run has been told to end: the next calls of checkpoint will save, and not return.

        Ranks may see it in different steps: agree with the others, by `mean` for example, before you act on it. A
        workload that has seen it and returns is preempted, unless its last checkpoint had last=True; without any
        checkpoint it is cancelled. `raise SystemExit(75)` on every rank says that it has saved its state itself.
        """
        self._calls.saves = True  # who asks will do something about it
        self._calls.seen = self._calls.seen or self._calls.told_to_end
        return self._calls.told_to_end

    @property
    def resume_folder(self) -> Path | None:
        """The folder of the checkpoint that this attempt goes on from, if any."""
        return Path(self._spec.checkpointing.resume_from) if self._spec.checkpointing.resume_from else None

    def log(
        self, values: Mapping[str, float | torch.Tensor], *, step: int | None = None, epoch: float | None = None
    ) -> None:
        """Log numbers to metrics.jsonl, as this rank's. Tensors of one element are read (which waits for the device).

        Raises:
            TypeError: a value is not a number, or `step` is not an integer.
        """
        numbers = {str(name): number(name, value) for name, value in values.items()}
        event = events.Metrics(time.time_ns(), numbers, whole("step", step), optional("epoch", epoch))
        self._emitter.emit(event)
        self._tracked.numbers(event)

    def log_image(self, name: str, image: Any, *, step: int | None = None, caption: str = "") -> None:
        """Keep a picture as artifacts/images/`name`/step-<n>-rank-<r>.png in the run directory; trackers get it, too.

        It is a tensor [3, H, W], [1, H, W] or [H, W], an array [H, W, 3] or [H, W], either of uint8 or of floats from
        0 to 1, or a PIL image. Further ones of a step are numbered.

        Raises:
            TypeError, ValueError: it is no picture, or the name would lead elsewhere.
            OSError: the staging disk is full.
        """
        self._showing.image(name, image, whole("step", step), caption)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        step: int | None = None,
        format: Literal["csv", "parquet"] = "csv",  # noqa: A002  # the word that people look for
    ) -> None:
        """Keep a table as artifacts/tables/`name`/[step-<n>-]rank-<r>.csv, or .parquet; trackers get it, too.

        Values are numbers, text, None, and pictures as in log_image, which become files whose paths the table has.

        Raises:
            TypeError, ValueError: a value is none of these, a row has another length than `columns`, or the name
                would lead elsewhere.
            ImportError: Parquet needs pyarrow.
            OSError: the staging disk is full.
        """
        self._showing.table(name, columns, rows, whole("step", step), format)

    @cached_property
    def _showing(self) -> Showing:
        from ddptrain.rank.media.log import Showing

        return Showing(self.rank, self._files, self._tracked)

    def progress(self, done: float, total: float | None = None, *, unit: str = "samples") -> None:
        """Tell how far this rank is, in `unit`; cheap enough for every step (ten a second are sent)."""
        self._emitter.progress(done, total, unit)

    def prepare(
        self,
        model: torch.nn.Module,
        *,
        precision: str | None = None,
        compile: bool | None = None,  # noqa: A002  # torch's own word
        channels_last: bool | None = None,
        **ddp: Any,
    ) -> torch.nn.Module:
        """The model on this rank's device, in DDP; what is not said here, the configuration's `prepare` says.

        All ranks must call it. `precision` is "fp32", or "bf16" for a forward pass under autocast; `ddp` are arguments
        of DistributedDataParallel. The weights keep their names. Raises ValueError for another precision.
        """
        from ddptrain.rank.prepare import prepared

        said = {"precision": precision, "compile": compile, "channels_last": channels_last}
        given = {name: value for name, value in said.items() if value is not None}
        self._tracked.model(model)
        self._gang_calls.enter("prepare")
        with self._gang_calls.waiting("prepare"):
            return prepared(model, self.device, {**self._spec.prepare, **given}, **ddp)

    def loader(
        self,
        dataset: torch.utils.data.Dataset[Any],
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **more: Any,
    ) -> GangLoader:
        """A DataLoader over this rank's share of the data, shuffled anew each epoch, the same way in each run.

        `batch_size` is a rank's; `more` are arguments of DataLoader (num_workers, collate_fn, ...). Its length is that
        of the epoch, `remaining` what is left. Its place in the epoch is saved with every checkpoint, and gone on from,
        also by other ranks; loaders are told apart by their order. Raises TypeError for data without a length.
        """
        from ddptrain.rank.data.loader import gang_loader

        how = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, **more}
        made = gang_loader(dataset, batch_size, self.rank, self.world_size, self.device, **how)
        if len(self._loaders) < len(self._places):
            made.load_state_dict(self._places[len(self._loaders)])
        self._loaders.append(made)
        return made

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs from 1 to `n` that are left to do; loaders of this context follow."""
        first = self._loaders[0].epoch if self._loaders else self._first_epoch
        for epoch in range(first, n + 1):
            for loader in self._loaders:
                loader.set_epoch(epoch)
            yield epoch

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """The mean of a number (or of a tensor's numbers) over all ranks; each counts `weight`.

        All ranks must call it: with `if ctx.rank == 0: ctx.mean(...)` the run fails.
        """
        return self._exchange.mean(value, weight)

    def all_finite(self, value: float | torch.Tensor) -> bool:
        """Whether a loss is finite on all ranks; the same answer on all of them. All ranks must call it."""
        return self._exchange.all_finite(value)

    @cached_property
    def _exchange(self) -> Exchange:
        from ddptrain.rank.collective.values import Exchange

        return Exchange(self._spec, self._gang_calls)

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """For a block that downloads or prepares something: rank 0 runs it, then all others do.

        All ranks must call it. An error of rank 0 ends the run, so that nobody waits for ever.
        """
        number = self._gang_calls.enter("rank_zero_first")
        if self.rank != 0:
            self._meet("rank_zero_first", number)
        yield
        if self.rank == 0:
            self._meet("rank_zero_first", number)

    def _meet(self, name: str, number: int) -> None:
        if self.world_size > 1:
            self._gang_calls.meet(name, number, self._store)

    def save_file(self, path: str, data: bytes | str | Path) -> None:
        """Hand over a file for artifacts/`path` in the run directory: bytes, text (UTF-8), or a Path to copy from.

        Raises:
            ValueError: the path would leave the run directory.
            OSError: the file can't be read, or the staging disk is full.
        """
        self._files.save(path, data)

    def checkpoint(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int,
        epoch: float | None = None,
        metrics: Mapping[str, float | torch.Tensor] | None = None,
        last: bool = False,
        rank_state: Any = None,
        **more: Any,
    ) -> bool:
        """Save a checkpoint if one is due, and hand it over. Returns whether it was.

        All ranks must call it, equally often: rank 0 writes the files, and every rank adds its random state. With
        `if ctx.rank == 0: ctx.checkpoint(...)` the run fails.

        It may be called after every step: due is the `last`, one whose `epoch` (from 1) is whole and divided by
        `checkpoint.every_epochs`, one at or after a multiple of `every_steps`, and one when `every_s` are over; with
        no epoch and neither of these, every one. `more` is anything with state_dict(), or plain data: numbers, text,
        lists, dictionaries, tensors; it is rank 0's, `rank_state` is each rank's own. The random states of all ranks
        are saved as well. The call returns once all is copied; a thread writes it.

        Raises:
            TypeError: something can't be saved in a form that loads without executing a pickle.
            OSError: a checkpoint before could not be written, `checkpoint.max_failures` times in a row.
            Preempted: the ranks were told to end, and this is the call with which all do; it has been saved.
        """
        self._gang_calls.enter("checkpoint")
        with self._gang_calls.waiting("checkpoint", int(step), self._waits_for_others):
            return self._checkpoint(model, optimizer, step, epoch, metrics or {}, rank_state, more, last=last)

    def _waits_for_others(self) -> bool:
        """Whether a checkpoint waits for other ranks, and not for the disk of rank 0."""
        return self.rank != 0 or self._saver.gathers

    def _checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        epoch: float | None,
        metrics: Mapping[str, float | torch.Tensor],
        rank_state: Any,
        more: Mapping[str, Any],
        *,
        last: bool,
    ) -> bool:
        call = self._calls.enter()
        self._calls.complete = last
        if self._saver.error is not None:
            self._saver.raise_error()
        due = self._due.now(call, step, epoch)
        ends = self._calls.told_to_end and self._calls.is_last(call)
        if not (due or last or ends):
            return False
        self._save(model, optimizer, int(step), optional("epoch", epoch), metrics, rank_state, more)
        if not self._spec.checkpointing.asynchronous or ends:
            self._saver.wait()
        if ends and not last:
            self._emitter.emit(events.Preempted(time.time_ns(), int(step)))
            raise Preempted
        return True

    def _save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        epoch: float | None,
        metrics: Mapping[str, float | torch.Tensor],
        rank_state: Any,
        more: Mapping[str, Any],
    ) -> None:
        own = plain_bytes({"random": random_state.capture(self.device), "rank_state": rank_state})
        self._saves += 1
        self._calls.has_saved = True
        if self.rank != 0:
            self._store.set(state_key(self._saves, self.rank), own)
            return
        numbers = {str(name): number(name, value) for name, value in metrics.items()}
        self._saver.wait()  # for the one before, whose memory is used again
        state: dict[str, Any] = {"step": step, "epoch": epoch, "metrics": numbers, "extra": dict(more)}
        state |= {"world_size": self.world_size, "loaders": [loader.state_dict() for loader in self._loaders]}
        copied = self._buffers.take(model, optimizer, state)
        self._saver.start(Save(self._saves, step, epoch, numbers, self._files.new_staging("checkpoint"), copied, own))
        self._due.saved()

    def close(self, deadline_s: float | None = None, *, failed: bool = False) -> bool:
        """Complete what is being saved; whether that was possible in time. The workload calls no more.

        Raises:
            OSError: it could not be written.
        """
        if self.rank == 0:
            with self._gang_calls.waiting("checkpoint", self._due.step, self._waits_for_others):
                return self._saver.wait(deadline_s, hurry=failed)
        if not failed:
            with suppress(RuntimeError):
                self._store.set(done_key(self.rank), "")
        return True

    def resume(
        self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
    ) -> Resumed | None:
        """Load the state to go on from into what it is given; None where there is nothing to resume.

        All ranks must call it, and wait for each other here: with `if ctx.rank == 0: ctx.resume(...)` the run fails.
        `more` are objects with load_state_dict(), named as in checkpoint(). With as many ranks as before, this rank's
        random states are put back, too; else they are new ones.
        """
        self._calls.saves = True
        self._meet("resume", self._gang_calls.enter("resume"))
        if not self._spec.checkpointing.resume_from:
            return None
        resumed, self._places = loaded(self._spec, self.device, model, optimizer, more, self._note)
        self._due.step = resumed.step
        self._first_epoch = int(resumed.epoch or 0) + 1
        for loader, place in zip(self._loaders, self._places, strict=False):
            loader.load_state_dict(place)
        return resumed

    def _note(self, text: str) -> None:
        if self.rank == 0:
            self._emitter.emit(events.Note(time.time_ns(), text))
