"""ctx.loader: all ranks together read each sample once per epoch; a run can be resumed within an epoch."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, _utils, dataloader
from torch.utils.data._utils import worker

from ddptrain.rank import process_control


class RankSampler(Sampler[Any]):
    """This rank's indices in an epoch: all ranks draw the same order, and take samples from it in turn.

    The first `taken` samples of the order are skipped, because ranks read them before a resume. If the rest can't be
    divided evenly, the first samples of the order are repeated, because DDP waits for all ranks in each step; with
    `drop_last` an incomplete step of all ranks is dropped instead.
    """

    def __init__(
        self,
        data: Sized,
        rank: int,
        world_size: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        with_epoch: bool = False,
    ) -> None:
        self._data, self._rank, self._world_size = data, rank, world_size
        self._step = batch_size * world_size
        self._shuffle, self._seed, self._drop_last, self._with_epoch = shuffle, seed, drop_last, with_epoch
        self.epoch = 1
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        own = self._order()[self._rank :: self._world_size].tolist()
        return iter([(index, self.epoch) for index in own] if self._with_epoch else own)

    def __len__(self) -> int:
        """Return the number of this rank's samples in the whole epoch, independent of the position."""
        return self._total(0) // self._world_size

    @property
    def size(self) -> int:
        """The number of samples of the data."""
        return len(self._data)

    @property
    def remaining(self) -> int:
        """The number of this rank's samples that remain in the epoch."""
        return self._total(self.taken) // self._world_size

    def _total(self, taken: int) -> int:
        """Return the number of samples of all ranks after the first `taken`, repeated but not dropped ones included."""
        left = max(0, len(self._data) - taken)
        if self._drop_last:
            return left - left % self._step
        return -(-left // self._world_size) * self._world_size

    def _order(self) -> torch.Tensor:
        size = len(self._data)
        if self._shuffle:
            draw = torch.Generator().manual_seed((self._seed * 1_000_003 + self.epoch) % (1 << 63))
            order = torch.randperm(size, generator=draw)
        else:
            order = torch.arange(size)
        rest, total = order[self.taken :], self._total(self.taken)
        while 0 < len(rest) < total:
            rest = torch.cat([rest, order[: total - len(rest)]])  # as without a resume: the same step is equal
        return rest[:total]


class RankLoader(DataLoader[Any]):
    """A DataLoader over this rank's share; each checkpoint of the context contains its position in the epoch.

    Its length is the number of this rank's batches in a whole epoch, also within the epoch and after a resume;
    `remaining` is the number of batches that are left.
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: RankSampler, batch_size: int, seeds: tuple[int, int], **more: Any
    ) -> None:
        """`seeds` are the seed and the rank, from which the random numbers of its workers follow."""
        self._rank_sampler, self._batch_size, self._seeds = sampler, batch_size, seeds
        self._own_generator = None if "generator" in more else torch.Generator()
        self._step = batch_size * sampler._world_size  # noqa: SLF001
        self.is_at_last_batch = False  # whether the batch that is in use is the last one of its epoch
        # A batch sampler, because DataLoader does not allow changes of its `sampler` between epochs.
        batches = BatchSampler(sampler, batch_size, drop_last=False)
        super().__init__(dataset, batch_sampler=batches, **{"generator": self._own_generator, **more})

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's returns its own iterator class
        if self._own_generator is not None:
            # Workers, for example in augmentation, have other random numbers on each rank and in each epoch, also if
            # this is the first epoch after a resume, but the same in each run.
            position = (*self._seeds, self.epoch, self._rank_sampler.taken)
            self._own_generator.manual_seed(hash(position) % (1 << 63))
        try:
            for batch in super().__iter__():
                # Before the step, so that a checkpoint after the step counts this batch.
                self._rank_sampler.taken += self._step
                self.is_at_last_batch = self.remaining == 0
                yield batch
        finally:
            self.is_at_last_batch = False
        self.set_epoch(self._rank_sampler.epoch + 1)

    @property
    def epoch(self) -> int:
        """The current or next epoch, from 1."""
        return self._rank_sampler.epoch

    @property
    def position(self) -> float:
        """The number of epochs that are read, also a fraction, with the batch that is in use: equal on all ranks."""
        return self.epoch - 1 + min(1.0, self._rank_sampler.taken / self._rank_sampler.size)

    @property
    def remaining(self) -> int:
        """The number of this rank's batches that remain in the epoch `epoch`."""
        return -(-self._rank_sampler.remaining // self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the first sample of an epoch; do nothing if it is the current epoch."""
        if epoch != self._rank_sampler.epoch:
            self._rank_sampler.epoch, self._rank_sampler.taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch, and the number of its samples that all ranks together have read."""
        return {"epoch": self.epoch, "taken": min(self._rank_sampler.taken, self._rank_sampler.size)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position; if its epoch is complete, start the next one."""
        is_complete = state["taken"] >= self._rank_sampler.size
        self._rank_sampler.epoch = state["epoch"] + int(is_complete)
        self._rank_sampler.taken = 0 if is_complete else state["taken"]


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    with_epoch: bool = False,
    **more: Any,
) -> RankLoader:
    """Create the loader for ctx.loader; `more` are arguments of DataLoader.

    Raises TypeError for data without a length, and for a sampler in `more`.
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(f"ctx.loader needs data that has a length, not {dataset!r}: use torch's DataLoader for it")
    if own := more.keys() & {"sampler", "batch_sampler"}:
        raise TypeError(f"ctx.loader has a sampler of its own: leave {min(own)} out, or use torch's DataLoader")
    how: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "with_epoch": with_epoch}
    sampler = RankSampler(dataset, rank, world_size, batch_size, **how)
    defaults: dict[str, Any] = {
        "pin_memory": device.type == "cuda",
        "persistent_workers": more.get("num_workers", 0) > 0,
    }
    return RankLoader(dataset, sampler, batch_size, (seed, rank), **{**defaults, **more})


class Loaders:
    """All loaders of a context, in the order of their creation, and its epochs."""

    def __init__(self) -> None:
        self._loaders: list[RankLoader] = []
        self._states: list[Mapping[str, int]] = []  # from the loaded checkpoint
        self._first_epoch = 1

    def add(self, loader: RankLoader) -> None:
        """Add a loader, which continues at its position in the loaded checkpoint."""
        if len(self._loaders) < len(self._states):
            loader.load_state_dict(self._states[len(self._loaders)])
        self._loaders.append(loader)

    def is_at_last_batch(self) -> bool:
        """Return whether the batch in use is the last one of the epoch of any loader."""
        return any(loader.is_at_last_batch for loader in self._loaders)

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the remaining epochs up to `n`, for which the loaders are set."""
        for epoch in range(self._loaders[0].epoch if self._loaders else self._first_epoch, n + 1):
            for loader in self._loaders:
                loader.set_epoch(epoch)
            yield epoch

    def state(self) -> list[dict[str, int]]:
        """Return the positions of all loaders."""
        return [loader.state_dict() for loader in self._loaders]

    def restore(self, states: list[Mapping[str, int]], first_epoch: int) -> None:
        """Continue at the positions of a checkpoint; without loaders the epochs begin with `first_epoch`."""
        self._states, self._first_epoch = states, first_epoch
        for loader, state in zip(self._loaders, states, strict=False):
            loader.load_state_dict(state)


_signals: Any = _utils.signal_handling
_torch_worker_loop = worker._worker_loop  # noqa: SLF001


def protect(warn: Callable[[str], None]) -> None:
    """Protect the workers of all DataLoaders that this process creates from now on.

    warn: called with the `risk_of_fork` of a DataLoader, once in the life of the process.
    """
    warned = False
    iterator: Any = dataloader._MultiProcessingDataLoaderIter  # noqa: SLF001
    start_workers = iterator.__init__

    @functools.wraps(start_workers)
    def start_protected(self: Any, loader: Any) -> None:
        nonlocal warned
        if not warned and (risk := risk_of_fork(loader)):
            warned = True
            warn(risk)
        start_workers(self, loader)
        for process in self._workers:
            process._popen.terminate = functools.partial(_kill, weakref.ref(self), process._popen)  # noqa: SLF001

    iterator.__init__ = start_protected
    worker._worker_loop = worker_loop  # noqa: SLF001


_HANGS_IN_FORKS = {"tokio-r": "obstore, or another library in Rust,", "grpc_": "gRPC"}  # by names of threads


def risk_of_fork(loader: DataLoader[Any]) -> str:
    """Return a warning if the loader forks its workers beside threads of a library that hangs in a fork; else ""."""
    context: Any = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() == "fork":
        for name in process_control.thread_names():
            for prefix, library in _HANGS_IN_FORKS.items():
                if name.startswith(prefix):
                    return (
                        f"{library} was used before a DataLoader forks its workers, in which it then hangs: use it in "
                        "the workers only, or give the DataLoader multiprocessing_context='forkserver'"
                    )
    return ""


def _kill(reference: weakref.ref[Any], process: Any) -> None:
    """End a worker as Process.terminate() does; torch must not report it as killed."""
    iterator = reference()
    if iterator is not None and iterator._worker_pids_set:  # noqa: SLF001
        _signals._remove_worker_pids(id(iterator))  # noqa: SLF001
        iterator._worker_pids_set = False  # noqa: SLF001
    process.kill()


def worker_loop(*args: Any, **kwargs: Any) -> None:
    """Run torch's loop of a DataLoader worker, which first sets its own signal handlers."""
    set_handlers = _signals._set_worker_signal_handlers  # noqa: SLF001

    def set_handlers_and_ours() -> None:
        set_handlers()
        signal.signal(signal.SIGTERM, _ignore)

    os.register_at_fork(before=_hold_sigterm, after_in_parent=_take_sigterm, after_in_child=_end_on_sigterm)
    _signals._set_worker_signal_handlers = set_handlers_and_ours  # noqa: SLF001
    _torch_worker_loop(*args, **kwargs)


def _ignore(*_: object) -> None:
    """Handle a signal by doing nothing."""


def _hold_sigterm() -> None:
    """Before a fork: a signal to the child must wait until the child has its own handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _take_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_on_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take_sigterm()
