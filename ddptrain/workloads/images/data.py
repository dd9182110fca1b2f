"""Images of any store as batches of a torch DataLoader, whose workers are forked and share torch with the rank.

A worker reads a whole batch with many requests at a time (`__getitems__`), and decodes images as they arrive.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import platformdirs
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddptrain.config.wording import shorten
from ddptrain.errors import TrainingFailed
from ddptrain.file_ops import temp_folder, write_atomic
from ddptrain.isolated import Isolated
from ddptrain.workloads.images import listing
from ddptrain.workloads.images.decode import Augment, CorruptImage, decode_pixels, ignore_pillow_warnings
from ddptrain.workloads.images.manifest import FILE, Manifest
from ddptrain.workloads.images.params import CacheParams, ImagesParams
from ddptrain.workloads.images.reader import Cache, Reader, ReadFailure

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext
    from ddptrain.rank.loader import RankLoader

Place = tuple[int, int]  # a position in the list of a dataset, and the epoch
_MOST_NAMED = 20
_LONGEST = 500  # characters of a key or a reason


class TooManyBadImages(TrainingFailed):
    """More images are unreadable than params.max_bad_fraction allows; the message lists them."""


@dataclass(slots=True)
class Batch:
    """Images of one rank.

    images: uint8 [n, 3, size, size], in channels_last memory; pinned if the rank has a GPU.
    labels: int64 [n], indices into manifest.classes.
    index: int64 [n], indices into manifest.keys: of the image that is shown, also if it replaces another.
    bad: why images can't be read, by their index into manifest.keys.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    bad: dict[int, str]

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory, from which a GPU copies while the rank continues."""
        return Batch(self.images.pin_memory(), self.labels.pin_memory(), self.index, self.bad)


class Images(Dataset[Batch]):
    """Some images of a manifest; `index` are indices into manifest.keys.

    The seed, the epoch and the image determine the pixels, so they do not depend on the number of ranks and workers.
    An image that is missing or damaged is replaced by another one of its class, or left out if `augment` is None. If a
    store has transient errors for a minute, StoreUnreachable is raised.
    """

    def __init__(
        self,
        manifest: Manifest,
        index: NDArray[np.int32],
        settings: ImagesParams,
        augment: Augment | None,
        *,
        requests: int | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self._manifest, self._index, self._augment = manifest, index, augment
        self._size, self._seed = settings.image_size, settings.seed
        self._requests = requests or settings.requests
        cache = Cache(_cache_folder(settings.cache), int(settings.cache.max_gb * 1e9), _say) if settings.cache else None
        self._reader = Reader(manifest.location(settings), cache, deadline_s)

    def __len__(self) -> int:
        return len(self._index)

    def __getitems__(self, places: Sequence[Place]) -> Batch:
        """Return the images at some places as a batch."""
        ignore_pillow_warnings()
        planned = [int(self._index[at]) for at, _ in places]
        images = torch.empty((len(planned), self._size, self._size, 3), dtype=torch.uint8)
        shown: dict[int, int] = {}  # row -> index
        bad: dict[int, str] = {}
        for row, data in self._reader.read_all(map(self._manifest.image, planned), self._requests):
            found = self._decoded(planned[row], places[row][1], data, bad)
            if found is not None:
                shown[row], pixels = found
                images[row] = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(images.shape[1:])
        index = [shown[row] for row in sorted(shown)]
        if len(index) < len(planned):
            images = images[sorted(shown)]
        labels = torch.tensor(self._manifest.labels[index].tolist(), dtype=torch.int64)
        return Batch(images.permute(0, 3, 1, 2), labels, torch.tensor(index, dtype=torch.int64), bad)

    def _decoded(
        self, planned: int, epoch: int, data: bytes | ReadFailure, bad: dict[int, str]
    ) -> tuple[int, bytes] | None:
        """Return the index and the pixels of the image that is shown; None if none is. Unreadable ones go into `bad`.

        Raises TooManyBadImages if no image of the class can be read.
        """
        draw = random.Random(f"{self._seed}/{epoch}/{planned}")
        index, others = planned, self._others(planned, draw)
        while True:
            if isinstance(data, ReadFailure):
                bad[index] = data.reason
            else:
                try:
                    return index, decode_pixels(data, self._size, self._augment, draw)
                except CorruptImage as error:
                    bad[index] = str(error)
            if self._augment is None:
                return None
            last, index = index, next(others, -1)
            if index < 0:
                name = self._manifest.classes[self._manifest.labels[planned]]
                raise TooManyBadImages(
                    f"no image of class {shorten(name)} could be read, the last one being "
                    f"{bad_line(self._manifest, last, bad[last])}; repair one, or leave the class out with "
                    "params.subset"
                )
            data = self._reader.read(self._manifest.image(index))

    def _others(self, index: int, draw: random.Random) -> Iterator[int]:
        """Yield the other training images of the class of an image, in an order that depends on `draw` alone."""
        train, labels = self._manifest.train, self._manifest.labels
        same = train[(labels[train] == labels[index]) & (train != index)].tolist()
        yield from draw.sample(same, len(same))


def image_list(ctx: RankContext, params: Mapping[str, Any]) -> Manifest:
    """Return the list of images that the driver has made for `workload: images`. For a copy of it, rank 0 makes it.

    Rank 0 uses another process: a DataLoader can't fork one that has connections to a store. Raises UsageError,
    StoreError.
    """
    if ctx.inputs is not None:
        return Manifest.read(ctx.inputs)
    with temp_folder("ddptrain-images-") as folder:
        if ctx.rank == 0:
            with Isolated(f"{listing.__name__}:list_for_copy", [dict(params), str(folder)]) as process:
                for text in process.answers():
                    ctx.say(text)
        found = [(folder / FILE).read_bytes() if ctx.rank == 0 else b""]
        dist.broadcast_object_list(found)
        write_atomic(folder / FILE, found[0])
        return Manifest.read(folder)


def train_loader(ctx: RankContext, manifest: Manifest, settings: ImagesParams) -> RankLoader:
    """Return the loader of this rank's training images; each checkpoint contains its position in the epoch."""
    workers = loader_workers(settings.loader_workers, ctx.device)
    requests = math.ceil(settings.requests / max(1, workers))
    data = Images(manifest, manifest.train, settings, settings.augmentation, requests=requests)
    return ctx.loader(
        data, batch_size=settings.batch_size, seed=settings.seed, with_epoch=True, **_worker_options(workers)
    )


def val_loader(ctx: RankContext, manifest: Manifest, settings: ImagesParams) -> DataLoader[Batch]:
    """Return a loader of this rank's part of the held-out images, each once over all ranks."""
    own = manifest.val[ctx.rank :: ctx.world_size]
    workers = min(loader_workers(settings.loader_workers, ctx.device), math.ceil(len(own) / settings.batch_size))
    data = Images(manifest, own, settings, None, requests=math.ceil(settings.requests / max(1, workers)))
    options = {"pin_memory": ctx.device.type == "cuda", "generator": torch.Generator(), **_worker_options(workers)}
    places: Any = [(at, 0) for at in range(len(own))]
    return DataLoader(data, settings.batch_size, sampler=places, **options)


def _worker_options(workers: int) -> dict[str, Any]:
    forked = {"multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": 3} if workers else {}
    return {"num_workers": workers, "collate_fn": _whole, **forked}


def _whole(batch: Batch) -> Batch:
    """Return the batch, which `__getitems__` has made."""
    return batch


def loader_workers(setting: str | int, device: torch.device) -> int:
    """Return the number of workers: `auto`: all cores but one (at most 16) with a GPU, else a quarter, at least 2."""
    if isinstance(setting, int):
        return setting
    cores = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(16, cores - 1)) if device.type == "cuda" else max(2, cores // 4)


class BadImages:
    """The unreadable images that this rank found: index into manifest.keys -> reason. Each is printed once."""

    def __init__(self, manifest: Manifest, max_fraction: float) -> None:
        self.reasons: dict[int, str] = {}
        self._manifest, self._max_fraction = manifest, max_fraction

    def add(self, bad: dict[int, str]) -> None:
        """Record and print the unreadable images of a batch. Raises TooManyBadImages."""
        for index, reason in bad.items():
            if index not in self.reasons:
                self.reasons[index] = reason
                _say(f"bad image {bad_line(self._manifest, index, reason)}")
        self._check(list(self.reasons))

    def check(self, device: torch.device) -> int:
        """Return the number of unreadable images of all ranks, which must call it. Raises TooManyBadImages on each."""
        is_bad = torch.zeros(len(self._manifest.keys), dtype=torch.uint8)
        is_bad[list(self.reasons)] = 1
        is_bad = is_bad.to(device)
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        found = is_bad.nonzero().flatten().tolist()
        self._check(found)
        return len(found)

    def _check(self, found: Sequence[int]) -> None:
        n_images = len(self._manifest.train) + len(self._manifest.val)
        if len(found) <= self._max_fraction * n_images:
            return
        reasons = [(index, self.reasons.get(index, "see the logs of the other ranks")) for index in found[:_MOST_NAMED]]
        listed = "".join(f"\n  {bad_line(self._manifest, index, reason)}" for index, reason in reasons)
        more = f"\n  and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise TooManyBadImages(
            f"{len(found)} of {n_images:,} images could not be read, which is more than params.max_bad_fraction "
            f"{self._max_fraction:g} allows: repair them, or raise it{listed}{more}"
        )


def bad_line(manifest: Manifest, index: int, reason: str) -> str:
    """Return name and reason in one short line, without control characters: neither of them can be trusted."""
    return f"{shorten(manifest.keys[index], _LONGEST)}: {shorten(reason, _LONGEST)}"


def _cache_folder(cache: CacheParams) -> Path:
    return Path(cache.dir).expanduser().absolute() if cache.dir else platformdirs.user_cache_path("ddptrain") / "images"


def _say(text: str) -> None:
    print(text, flush=True)
