"""Batches of images for one rank: read, decoded and put together ahead of the training, in a fixed order."""

from __future__ import annotations

import math
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import platformdirs
import torch

from ddptrain.workloads.images.loader.bad_images import BadImages, TooManyBadImages, check_bad
from ddptrain.workloads.images.loader.batch_plan import plan_epoch, plan_validation
from ddptrain.workloads.images.loader.batcher import READY, Assembler, Batch, Begin, End, Stop, Stream, Taken
from ddptrain.workloads.images.loader.decode_pool import Crew, DecodeProcessLost, ProcessCrew, ThreadCrew, shared_memory
from ddptrain.workloads.images.loader.decode_process import Setup
from ddptrain.workloads.images.loader.decode_worker import AHEAD

if TYPE_CHECKING:
    from ddptrain.storage.base import Location
    from ddptrain.workloads.images.data.manifest import Manifest
    from ddptrain.workloads.images.params import CacheParams, ImagesParams

__all__ = ["Batch", "DecodeProcessLost", "Feeder", "TooManyBadImages", "check_bad"]

_MOST_PIXEL_BYTES = 1 << 30  # of slots, unless a single batch needs more
_DEADLINE_S = 60.0  # for an image, all tries together
_LOOK_S = 1.0


class Feeder:
    """Gives one rank its batches; what comes next is made while it computes, also across the ends of epochs.

    What a batch holds depends on the seed, the epoch and the images alone, never on the number of processes, and of
    the images of an epoch never on the number of ranks. Processes are started here, and end with `close`, or with
    this process, however it ends.
    """

    def __init__(
        self,
        manifest: Manifest,
        location: Location,
        settings: ImagesParams,
        device: torch.device,
        rank: int,
        world_size: int,
        tell: Callable[[str], None],
        *,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self._settings, self._rank, self._world_size = settings, rank, world_size
        self._train, self._val = torch.tensor(manifest.train), torch.tensor(manifest.val)
        self._bad = BadImages(manifest, settings.max_bad_fraction, tell)
        self._next: Stream | None = None
        self._epoch = 0
        processes = loader_workers(settings.loader_workers, device)
        val_location = manifest.val_location(settings)
        setup = self._setup(location, val_location.url if val_location else "", processes, deadline_s)
        pixels = np.frombuffer(mmap.mmap(setup.pixels_fd, 0), np.uint8)
        shaped = pixels.reshape(-1, setup.size, setup.size, 3)
        self._assembler = Assembler(manifest, shaped, self._bad, device)
        self._crew: Crew = (
            ProcessCrew(setup, processes, self._assembler.inbox.put, tell)
            if processes
            else ThreadCrew(setup, _cores(), self._assembler.inbox.put)
        )
        os.close(setup.pixels_fd)
        self._thread = threading.Thread(
            target=self._assembler.run, args=(self._crew,), name="ddptrain-feeder", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and processes."""
        if self._thread.is_alive():
            self._crew.close()
            self._assembler.inbox.put(Stop())
            self._thread.join()

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(key, reason) of each image that this rank could not have, in the order in which it met them."""
        return list(self._bad.by_key().items())

    @property
    def bad_index(self) -> list[int]:
        """The same as places in manifest.keys."""
        return list(self._bad.reasons)

    def steps(self, epoch: int, taken: Sequence[Sequence[int]] = ()) -> int:
        """Steps of all ranks in an epoch, or in what others have left of it."""
        return len(self._training(epoch, taken, 0).shares)

    def train(self, epoch: int, taken: Sequence[Sequence[int]] = (), first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch (from 1), or of what others have left of it, from step `first` on.

        `taken` are (number of ranks, steps) pairs of those that began it, as plan_epoch wants them.
        Raises: TooManyBadImages; DecodeProcessLost; StoreUnreachable where the store is away for over a minute.
        """
        self._epoch = epoch
        return self._batches(self._training(epoch, taken, first))

    def validate(self) -> Iterator[Batch]:
        """The batches of all images that are held out. Raises: as `train` does."""
        return self._batches(self._validation())

    def _batches(self, stream: Stream) -> Iterator[Batch]:
        if self._next is not None and self._next.name == stream.name:
            stream = self._next
        self._next = self._probably_after(stream)
        inbox = self._assembler.inbox
        inbox.put(Begin(stream, self._next))
        try:
            for _ in stream.shares:
                batch = self._taken_from(stream)
                inbox.put(Taken(stream))
                yield batch
        finally:
            inbox.put(End(stream))

    def _taken_from(self, stream: Stream) -> Batch:
        """The next batch: each image has its deadline, so it comes, or an error does."""
        while True:
            try:
                batch = stream.ready.get(timeout=_LOOK_S)
            except queue.Empty:
                if not self._thread.is_alive():
                    raise RuntimeError("the feeder has been closed") from None
                continue
            if isinstance(batch, Exception):
                raise batch
            return batch

    def _training(self, epoch: int, taken: Sequence[Sequence[int]], first: int) -> Stream:
        settings = self._settings
        name = ("train", epoch, tuple(map(tuple, taken)), first)
        shares = plan_epoch(
            len(self._train), settings.batch_size, self._world_size, self._rank, settings.seed, epoch, taken
        )
        return Stream(name, shares[first:], self._train, settings.seed * 1_000_003 + epoch)

    def _validation(self) -> Stream:
        shares = plan_validation(len(self._val), self._settings.batch_size, self._world_size, self._rank)
        return Stream(("validate",), shares, self._val, None)

    def _probably_after(self, stream: Stream) -> Stream | None:
        if stream.seed is not None and len(self._val):
            return self._validation()
        return self._training(self._epoch + 1, (), 0) if self._epoch < self._settings.epochs else None

    def _setup(self, location: Location, val_url: str, processes: int, deadline_s: float) -> Setup:
        settings = self._settings
        cache = settings.cache
        size = settings.image_size
        readers = math.ceil(settings.requests / max(1, processes))
        # Batches that wait complete are not in slots any more.
        wanted = max(settings.batch_size * max(1, settings.prefetch - READY), settings.requests + AHEAD * processes)
        slots = max(settings.batch_size, min(wanted + settings.batch_size, _MOST_PIXEL_BYTES // (size * size * 3)))
        return Setup(
            url=location.url,
            options=dict(location.options),
            cache_dir=str(_cache_folder(cache)) if cache else None,
            cache_bytes=int(cache.max_gb * 1e9) if cache else 0,
            deadline_s=deadline_s,
            size=size,
            augment=settings.augmentation,
            readers=readers,
            pixels_fd=shared_memory(slots * size * size * 3),
            answers_fd=-1,
            val_url=val_url,
        )


def loader_workers(setting: str | int, device: torch.device) -> int:
    """Processes that decode for a rank: auto leaves a core to a rank with a GPU, and most of them to one without."""
    if isinstance(setting, int):
        return setting
    return max(1, min(16, _cores() - 1)) if device.type == "cuda" else max(1, _cores() // 4)


def _cores() -> int:
    """This rank's share of the host's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _cache_folder(cache: CacheParams) -> Path:
    return Path(cache.dir).expanduser().absolute() if cache.dir else platformdirs.user_cache_path("ddptrain") / "images"
