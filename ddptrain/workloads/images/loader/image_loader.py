"""Batches of images for one rank, in a fixed order, prepared ahead of the training."""

from __future__ import annotations

import math
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import platformdirs
import torch

from ddptrain.storage.store import Location
from ddptrain.workloads.data_shards import plan_epoch, plan_validation
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.bad_images import BadImages
from ddptrain.workloads.images.loader.batcher import Batch, Batcher, BatchStream
from ddptrain.workloads.images.loader.decode_client import AHEAD
from ddptrain.workloads.images.loader.decode_pool import (
    DecodePool,
    ProcessDecodePool,
    ThreadDecodePool,
    shared_memory,
)
from ddptrain.workloads.images.loader.decode_process import DecodeSetup
from ddptrain.workloads.images.params import CacheParams, ImagesParams

_MOST_PIXEL_BYTES = 1 << 30  # of all slots, unless a single batch needs more
_DEADLINE_S = 60.0  # for an image, including retries
_CHECK_THREAD_S = 1.0


class ImageLoader:
    """Gives a rank its batches; prepares the next ones while the rank computes, also across epochs.

    The content of a batch depends only on the seed, the epoch and the images, not on the number of processes; the
    images of an epoch do not depend on the number of ranks. The constructor starts the processes; they end with
    `close`, or with this process in any case. A batch of the training has `accumulate` times params.batch_size images.
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
        accumulate: int = 1,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self._step_images = settings.batch_size * accumulate
        self._settings, self._rank, self._world_size = settings, rank, world_size
        self._train, self._val = torch.tensor(manifest.train), torch.tensor(manifest.val)
        self._bad = BadImages(manifest, settings.max_bad_fraction, tell)
        self._next: BatchStream | None = None
        self._epoch = 0
        processes = loader_workers(settings.loader_workers, device)
        val_location = manifest.val_location(settings)
        setup = self._setup(location, val_location.url if val_location else "", processes, deadline_s)
        pixels = np.frombuffer(mmap.mmap(setup.pixels_fd, 0), np.uint8)
        shaped = pixels.reshape(-1, setup.size, setup.size, 3)
        self._batcher = Batcher(manifest, shaped, self._bad, device)
        self._pool: DecodePool = (
            ProcessDecodePool(setup, processes, self._batcher.inbox.put, tell)
            if processes
            else ThreadDecodePool(setup, _cores(), self._batcher.inbox.put)
        )
        os.close(setup.pixels_fd)
        work = self._batcher.run
        self._thread = threading.Thread(target=work, args=(self._pool,), name="ddptrain-feeder", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and processes."""
        if self._thread.is_alive():
            self._pool.close()
            self._batcher.inbox.put(None)
            self._thread.join()

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(name, reason) of each unreadable image that this rank found, in that order."""
        return list(self._bad.by_key().items())

    @property
    def bad_index(self) -> list[int]:
        """The same images as indices into manifest.keys."""
        return list(self._bad.reasons)

    def steps(self, epoch: int, taken: Sequence[Sequence[int]] = ()) -> int:
        """Return steps of all ranks in an epoch, or in the part of it that other ranks left."""
        return len(self._training(epoch, taken, 0).shares)

    def train(self, epoch: int, taken: Sequence[Sequence[int]] = (), first: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch (from 1), or of the part of it that other ranks left, from step `first` on.

        `taken`: (number of ranks, steps) pairs of the ranks that began the epoch, as for plan_epoch.
        Raises: TooManyBadImages; DecodeProcessLost; StoreUnreachable if the store does not answer for over a minute.
        """
        self._epoch = epoch
        return self._batches(self._training(epoch, taken, first))

    def validate(self) -> Iterator[Batch]:
        """Return the batches of all held-out images. Raises as `train` does."""
        return self._batches(self._validation())

    def _batches(self, stream: BatchStream) -> Iterator[Batch]:
        if self._next is not None and self._next.name == stream.name:
            stream = self._next
        self._next = self._predict_next(stream)
        inbox = self._batcher.inbox
        inbox.put(partial(self._batcher.begin, stream, self._next))
        try:
            for _ in stream.shares:
                batch = self._next_batch(stream)
                inbox.put(stream.take)
                yield batch
        finally:
            inbox.put(partial(self._batcher.drop, stream))

    def _next_batch(self, stream: BatchStream) -> Batch:
        """Return the next batch. Each image has a deadline, so the call returns or raises an error."""
        while True:
            try:
                batch = stream.ready.get(timeout=_CHECK_THREAD_S)
            except queue.Empty:
                if not self._thread.is_alive():
                    raise RuntimeError("the loader has been closed") from None
                continue
            if isinstance(batch, Exception):
                raise batch
            return batch

    def _training(self, epoch: int, taken: Sequence[Sequence[int]], first: int) -> BatchStream:
        settings = self._settings
        name = ("train", epoch, tuple(map(tuple, taken)), first)
        shares = plan_epoch(
            len(self._train), self._step_images, self._world_size, self._rank, settings.seed, epoch, taken
        )
        return BatchStream(name, shares[first:], self._train, settings.seed * 1_000_003 + epoch)

    def _validation(self) -> BatchStream:
        shares = plan_validation(len(self._val), self._settings.batch_size, self._world_size, self._rank)
        return BatchStream(("validate",), shares, self._val, None)

    def _predict_next(self, stream: BatchStream) -> BatchStream | None:
        if stream.seed is not None and len(self._val):
            return self._validation()
        return self._training(self._epoch + 1, (), 0) if self._epoch < self._settings.epochs else None

    def _setup(self, location: Location, val_url: str, processes: int, deadline_s: float) -> DecodeSetup:
        settings = self._settings
        cache = settings.cache
        size = settings.image_size
        readers = math.ceil(settings.requests / max(1, processes))
        # The next two batches; complete ones, which wait for the training, are not in slots.
        batch = self._step_images
        wanted = max(2 * batch, settings.requests + AHEAD * processes)
        slots = max(batch, min(wanted + batch, _MOST_PIXEL_BYTES // (size * size * 3)))
        return DecodeSetup(
            url=location.url,
            options=dict(location.options),
            cache_dir=str(_cache_folder(cache)) if cache else None,
            cache_bytes=int(cache.max_gb * 1e9) if cache else 0,
            deadline_s=deadline_s,
            size=size,
            augment=settings.augmentation,
            readers=readers,
            pixels_fd=shared_memory(slots * size * size * 3),
            results_fd=-1,
            val_url=val_url,
        )


def loader_workers(setting: str | int, device: torch.device) -> int:
    """Return the number of decode processes: `auto`: all cores but one (at most 16) with a GPU, else a quarter."""
    if isinstance(setting, int):
        return setting
    return max(1, min(16, _cores() - 1)) if device.type == "cuda" else max(1, _cores() // 4)


def _cores() -> int:
    """Return the number of the host's cores for this rank."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _cache_folder(cache: CacheParams) -> Path:
    return Path(cache.dir).expanduser().absolute() if cache.dir else platformdirs.user_cache_path("ddptrain") / "images"
