"""The context of a rank (`ctx`): what a workload uses to log, report progress, save and resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.errors import one_line
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.agreement import Agreement, CollectiveValues, PreemptedExit
from ddptrain.rank.checkpoint.checkpoints import Checkpoints, Resumed
from ddptrain.rank.gradients import GradientSteps
from ddptrain.rank.loader import Loaders, RankLoader, make_loader
from ddptrain.rank.output import ArtifactFiles, Emitter, number, numbers, optional, optional_whole, whole
from ddptrain.rank.profile import StepProfiler
from ddptrain.rank.trackers import RankTrackers

if TYPE_CHECKING:
    import torch
    import torch.utils.data

    from ddptrain.rank.media import MediaLog

__all__ = ["NoRank", "PreemptedExit", "RankContext", "Resumed", "context"]


class RankContext:
    """A rank's view of its run. The process group is initialized as long as a workload has a context.

    - `run_id`: the run's name in the runs folder; `attempt`: the number of this attempt, from 1
    - `rank`: this process among all `world_size` processes of the run, from 0; `device`: its `torch.device`
    - `local_rank`: this process among the run's `local_world_size` processes on its host, from 0
    - `node_rank`: this host among the run's hosts, from 0
    - `inputs`: the folder with what the driver has prepared (a `Path`); None if the workload prepares nothing
    - `resume_folder`: the folder of the checkpoint from which this attempt resumes (a `Path`); None if there is none
    """

    def __init__(
        self,
        spec: RankSpec,
        emitter: Emitter,
        device: torch.device,
        agreement: Agreement | None = None,
        tracked: RankTrackers | None = None,
    ) -> None:
        """`agreement` and `tracked` may exist before the context, because a command to end can arrive earlier."""
        place = spec.placement
        self.run_id, self.attempt, self.rank, self.device = spec.run_id, spec.attempt, spec.rank, device
        self.world_size, self.node_rank = place.world_size, place.node_rank
        self.local_rank, self.local_world_size = place.local_rank, place.local_world_size
        self.inputs = Path(spec.code.inputs) if spec.code.inputs else None
        self.resume_folder = Path(spec.resume_from) if spec.resume_from else None
        self._spec, self._emitter = spec, emitter
        self._files = ArtifactFiles(spec, emitter)
        self._tracked = tracked or RankTrackers(spec, emitter)
        self._agreement = agreement or Agreement(spec)
        self._profiler = StepProfiler(spec, device, self._files, emitter)
        self._values = CollectiveValues(spec)
        self._loaders = Loaders()
        self._gradients = GradientSteps(device, is_last_batch=self._loaders.is_at_last_batch)
        self._gradients.use(spec.config.prepare.precision, spec.config.prepare.accumulate)
        parts = self._agreement, self._tracked, self._files, self._loaders, self._gradients
        self._checkpoints = Checkpoints(spec, emitter, device, *parts)

    @property
    def preempted(self) -> bool:
        """Whether the run was asked to end. One of the next calls of `checkpoint` saves and does not return.

        The value may become True in different steps on different ranks: agree with the other ranks, for example with
        `mean`, before you act on it. A workload that has read True and returns is preempted, unless its last checkpoint
        had last=True; if it has saved no checkpoint, the run is cancelled. If the workload has saved its state itself,
        `raise SystemExit(75)` on every rank.
        """
        agreement = self._agreement
        agreement.saves = True  # a workload that reads this property will react to it
        agreement.read_preempted = agreement.read_preempted or agreement.asked_to_end
        return agreement.asked_to_end

    def log(
        self, values: Mapping[str, float | torch.Tensor], *, step: int | None = None, epoch: float | None = None
    ) -> None:
        """Log this rank's numbers to metrics.jsonl and to the trackers.

        Values are numbers, or tensors and arrays with one element; a tensor on a GPU makes the call wait for the GPU.
        `step` is a whole number, `epoch` may be a fraction (1.5: half of the second epoch is over).

        Raises:
            TypeError: a value is neither a number nor a tensor with one element, or `step` is not an integer.
            OSError: the staging disk is full.
        """
        step = optional_whole("step", step)
        self._log(numbers(values), step, optional("epoch", epoch))
        if step is not None:
            self._checkpoints.logged(step)
            self._profiler.reported(step)

    def _log(self, values: dict[str, float], step: int | None, epoch: float | None) -> None:
        event = events.Metrics(time.time_ns(), values, step, epoch)
        self._emitter.emit(event)
        self._tracked.numbers(event)
        if (patience := self._agreement.patience) is not None and self.rank == 0:
            patience.add("log", values, step, epoch)

    def log_image(self, name: str, image: Any, *, step: int | None = None, caption: str = "") -> None:
        """Save an image as artifacts/images/`name`/step-<n>-rank-<r>.png in the run directory, and send it to trackers.

        `image` is a tensor [3, H, W], [1, H, W] or [H, W], an array [H, W, 3] or [H, W], each of uint8 or of floats
        from 0 to 1, or a PIL image. Further images of the same name and step get a number.

        Raises:
            TypeError, ValueError: `image` is not an image, or `name` leads out of the folder.
            OSError: the staging disk is full.
        """
        self._media.image(name, image, optional_whole("step", step), caption)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        step: int | None = None,
    ) -> None:
        """Save a table as artifacts/tables/`name`/[step-<n>-]rank-<r>.csv, and send it to trackers.

        Values are numbers, text, None, and images as in log_image. Images are saved as files, and the table has their
        paths.

        Raises:
            TypeError, ValueError: a value has another type, a row has another length than `columns`, or `name` leads
                out of the folder.
            OSError: the staging disk is full.
        """
        self._media.table(name, columns, rows, optional_whole("step", step))

    @cached_property
    def _media(self) -> MediaLog:
        from ddptrain.rank.media import MediaLog

        return MediaLog(self.rank, self._files, self._tracked)

    def progress(self, done: float, total: float | None = None, *, unit: str = "samples") -> None:
        """Report this rank's progress: `done` of `total` (None: not known), both in `unit`.

        It may be called in every step: at most 10 events per second are sent.

        Raises:
            TypeError: a value is not a number.
            OSError: the staging disk is full.
        """
        self._emitter.progress(number("done", done), optional("total", total), unit)
        if unit == "steps":
            self._profiler.reported(int(done))

    def say(self, text: str) -> None:
        """Print a line on rank 0; do nothing on the other ranks."""
        if self.rank == 0:
            print(text, flush=True)

    def alert(self, text: str) -> None:
        """Tell the user something that should be looked at now: the first line of `text`, at most 1,000 characters.

        It is shown as a warning, recorded in events.jsonl, and sent to `notify.urls`, with the rank's number. Every
        rank may call it. Messages in the same minute are sent together.
        """
        self._emitter.emit(events.Alert(time.time_ns(), one_line(str(text))[:1_000]))

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Measure the time of a block: `with ctx.timed("evaluation"):`. The line `time` of the run shows "evaluation".

        Every rank may use it. Times of rank 0 of at least 0.01 s are recorded in events.jsonl.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            if self.rank == 0:
                self._emitter.timed(activity, time.monotonic() - began)

    def prepare(
        self,
        model: torch.nn.Module,
        *,
        precision: str | None = None,
        compile: bool | None = None,  # noqa: A002  # torch's name
        channels_last: bool | None = None,
        accumulate: int | None = None,
        strategy: str | None = None,
        shard: Sequence[str] | None = None,
        activation_checkpointing: Sequence[str] | None = None,
        **ddp: Any,
    ) -> torch.nn.Module:
        """Move the model to this rank's device and wrap it in DDP. Missing arguments come from the section `prepare`.

        All ranks must call it. `precision` is "fp32", or "bf16" or "fp16" for a forward pass under autocast; `ddp` are
        arguments of DistributedDataParallel. The weights keep their names. `accumulate` and the loss scale of fp16 need
        `ctx.backward` and `ctx.step`. `strategy` is "ddp"; "fsdp", which shards the model over all ranks; or "hybrid",
        which shards it over the ranks of each host. Create the optimizer after this call. `shard` and
        `activation_checkpointing` are names of classes of layers.

        Raises:
            ValueError: another precision or strategy, a class that no layer has, `accumulate` below 1, or a model that
                has been prepared before.
            TypeError: an argument that DistributedDataParallel does not have.
        """
        from ddptrain.rank.prepare import prepare_model, use_compile_cache

        given: dict[str, Any] = {"precision": precision, "compile": compile, "channels_last": channels_last}
        given["accumulate"] = accumulate
        given |= {"strategy": strategy, "shard": shard, "activation_checkpointing": activation_checkpointing}
        settings: dict[str, Any] = {
            **vars(self._spec.config.prepare),
            **{name: value for name, value in given.items() if value is not None},
            "hosts": self._spec.placement.hosts,
            "ranks_on_host": self.local_world_size,
        }
        self._gradients.use(settings.get("precision", "fp32"), settings.get("accumulate", 1))
        if settings.get("compile"):
            use_compile_cache(self._spec)
        prepared = prepare_model(model, self.device, settings, **ddp)
        self._gradients.attach(prepared)
        return prepared

    @property
    def accumulate(self) -> int:
        """The number of batches per step of the optimizer, from ctx.prepare or the configuration."""
        return self._gradients.accumulate

    def backward(self, loss: torch.Tensor) -> None:
        """Call `loss.backward()`, with the loss scale of fp16. `loss` is the mean over this rank's batch.

        Raises:
            RuntimeError: optimizer.zero_grad() was called before all batches of a step were accumulated.
        """
        self._gradients.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer, *, clip: float | None = None, last: bool = False) -> bool:
        """Count a batch, after its `backward`; return whether the optimizer took a step, so that the weights have
        changed.

        With `accumulate` the optimizer takes a step with every N-th batch and with the last batch of an epoch. Its
        gradient is the mean over these batches, also if the last step of an epoch has fewer than N; then the gradients
        are set to zero. ctx.loader detects the last batch; with any other loader pass last=True for it, on all ranks.
        `clip` is the largest norm of the gradient. With fp16 a step with infinite gradients is skipped, and logged as
        train/skipped_steps and train/loss_scale.

            ctx.backward(loss)
            if ctx.step(optimizer, clip=1.0):
                scheduler.step()

        Raises:
            FloatingPointError: the gradients were infinite or NaN in 100 steps in a row.
        """
        steps = self._gradients
        skipped = steps.skipped
        taken = steps.step(optimizer, clip, last=last)
        if steps.skipped > skipped and self.rank == 0:
            self._log({"train/skipped_steps": float(steps.skipped), "train/loss_scale": steps.scale}, None, None)
        return taken

    def loader(
        self,
        dataset: torch.utils.data.Dataset[Any],
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        with_epoch: bool = False,
        **more: Any,
    ) -> RankLoader:
        """Return a DataLoader over this rank's part of the data.

        Each epoch has another order, which is equal in each run.

        `batch_size` is the number of samples per rank; `more` are arguments of DataLoader, such as num_workers. len()
        is the number of batches in an epoch, `remaining` the number of batches that are left. Checkpoints contain the
        position in the epoch, and a resumed run continues there, also with another number of ranks. Several loaders are
        identified by their order of creation. With `with_epoch` the data set is asked for (index, epoch) instead of
        index, so that its augmentation can depend on the epoch and not on the number of ranks or workers.

        Raises:
            TypeError: the data has no length, or `more` has a sampler.
        """
        options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "with_epoch": with_epoch, **more}
        loader = make_loader(dataset, batch_size, self.rank, self.world_size, self.device, **options)
        self._loaders.add(loader)
        return loader

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the remaining epochs up to `n`, counted from 1. Set the epoch of all loaders of this context.

        With `stop_early` in the configuration the epochs end early, on all ranks after the same one.
        """
        agreement = self._agreement
        for epoch in self._loaders.epochs(n):
            if agreement.ends_epochs():
                self._stop_early()
                return
            self._emitter.emit(events.Epochs(time.time_ns(), n, epoch))
            agreement.counts_epochs = True
            try:
                yield epoch
            finally:
                agreement.counts_epochs = False

    def _stop_early(self) -> None:
        if (patience := self._agreement.patience) is not None and self.rank == 0:
            self._emitter.emit(patience.end())

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """Return the mean of a number (or of all elements of a tensor of any shape) over all ranks.

        Each rank's value counts with its `weight`, such as its number of samples; NaN if all weights are 0. All ranks
        must call it: `if ctx.rank == 0: ctx.mean(...)` makes the run fail.

        Raises:
            RuntimeError: other ranks have ended.
        """
        return self._values.mean(value, weight)

    def all_finite(self, value: float | torch.Tensor) -> bool:
        """Return whether a number, or all elements of a tensor, are finite on all ranks: equal on all ranks.

        All ranks must call it.

        Raises:
            RuntimeError: other ranks have ended.
        """
        return self._values.all_finite(value)

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Execute the block on rank 0 first, then on all other ranks. Use it for downloads and other preparation.

        All ranks must call it. An error of rank 0 ends the run, so no rank waits forever.

        Raises:
            RuntimeError: a rank has not called it within the time limit of collective operations.
        """
        if self.rank != 0:
            self._agreement.meet("rank_zero_first")
        yield
        if self.rank == 0:
            self._agreement.meet("rank_zero_first")

    def save_file(self, path: str, data: bytes | str | Path) -> None:
        """Save a file as artifacts/`path` in the run directory: bytes, text (as UTF-8), or a Path to copy from.

        Raises:
            ValueError: the path leads out of the run directory.
            OSError: the file cannot be read, or the staging disk is full.
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
        """Save a checkpoint if one is due. Return whether it was due.

        All ranks must call it equally often: rank 0 writes the files (each rank writes its slices of a sharded model),
        and every rank adds its random state.
        `if ctx.rank == 0: ctx.checkpoint(...)` makes the run fail.

        It may be called after every step. A checkpoint is due if `last` is True, if `epoch` (from 1) is a whole number
        and a multiple of `checkpoint.every_epochs`, at or after each multiple of `every_steps`, and when `every_s`
        seconds have passed; without an epoch and without these two settings, every call saves. A checkpoint that is due
        between two micro-batches of an accumulated step is saved by the call after the step. `more` are objects with
        state_dict(), or plain data (numbers, text, lists, dictionaries, tensors): those of rank 0 are saved. Of each of
        `metrics` the mean over the ranks that give it is saved.
        `rank_state` is such data that is saved for each rank. The call returns when everything is copied; a thread
        writes the files.

        Raises:
            TypeError: `step` is not an integer, or a value cannot be saved in a form that loads without executing a
                pickle.
            CheckpointNotWritten: an earlier checkpoint could not be written.
            PreemptedExit: the run was asked to end, and all ranks end with this call; the checkpoint has been saved.
            SystemExit: `stop_early` ends the training, and the code has no loop over ctx.epochs, which would end; the
                checkpoint has been saved, and the run has succeeded.
        """
        step = whole("step", step)
        self._profiler.reported(step)
        given = metrics or {}, rank_state, more
        saved, ends, early = self._checkpoints.save(model, optimizer, step, epoch, *given, last=last)
        if ends:
            self._profiler.close(complete=False)
            self._emitter.emit(events.Preempted(time.time_ns(), step))
            raise PreemptedExit
        if early and not self._agreement.counts_epochs:
            self._stop_early()
            raise SystemExit(0)
        return saved

    def close(self, deadline_s: float | None = None, *, failed: bool = False) -> bool:
        """Complete the checkpoint that is being written, after the last call of the workload.

        Return whether it was complete within `deadline_s` seconds. Raises OSError if it could not be written.
        """
        self._profiler.close(complete=not failed)
        return self._checkpoints.close(deadline_s, failed=failed)

    def resume(
        self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
    ) -> Resumed | None:
        """Load the checkpoint to resume from into the given objects. Return None if there is none.

        All ranks must call it, and the call waits for all ranks: `if ctx.rank == 0: ctx.resume(...)` makes the run
        fail. `more` are objects with load_state_dict(), named as in checkpoint(). The random states of this rank are
        also restored, if the number of ranks is the same as before.

        Raises:
            RuntimeError: the weights do not fit the model, the optimizer has other parameters, or a rank has not called
                it within the time limit of collective operations.
            ValueError, OSError: files of the checkpoint are damaged or missing.
        """
        resumed = self._checkpoints.load(model, optimizer, more)
        self._profiler.reported(resumed.step if resumed is not None else 0)
        return resumed


class NoRank(RuntimeError):
    """This process is not a rank."""


_make: Callable[[], RankContext] | None = None


def context() -> RankContext:
    """Return the context of this rank, for scripts and for functions without a ctx parameter: always the same object.

    Raises:
        NoRank: ddptrain has not started this process as a rank.
    """
    if _make is None:
        raise NoRank(
            "ddptrain.context() was called in a process that is not a rank: it is for code that `ddptrain train` or "
            "`ddptrain run` has started (not plain python, torchrun, or a process that a rank has spawned)"
        )
    return _make()


def provide(make: Callable[[], RankContext]) -> None:
    """Set the function that context() calls in this process, which is a rank."""
    global _make  # noqa: PLW0603  # a process is at most one rank
    _make = make
