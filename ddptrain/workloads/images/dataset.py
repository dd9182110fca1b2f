"""Folders of images as a torch dataset, for training code of one's own: any store, with many requests under way."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from PIL import Image
from torch.utils.data import Dataset

from ddptrain.storage.base import Location
from ddptrain.workloads.images.data.listing_process import listed_elsewhere, listed_here
from ddptrain.workloads.images.loader.cache import Cache
from ddptrain.workloads.images.loader.decode import FORMATS
from ddptrain.workloads.images.loader.reader import REQUESTS, SURVIVE_A_FORK, Reader, ReadFault, Tries, Wanted

if TYPE_CHECKING:
    from dask_pytorch_ddp.data import S3ImageFolder

Transform = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Source:
    source: str
    source_options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Images:
    """What there is, and the label of each."""

    location: Location
    classes: Sequence[str]
    images: Sequence[tuple[Wanted, int]]


class UnreadableImage(OSError):
    """An image could not be had, or is none; says which and why."""


class ImageFolder(Dataset[tuple[Any, Any]]):
    """(image, label) of each image below `source`, CLASS/IMAGE, in the order of its classes and keys.

    `source` is a folder or a URL (s3://, gs://, az://, https://, ...), `options` are the store's as fsspec names them.
    Images are PIL's, RGB, before `transform`. A DataLoader asks for whole batches, which are read with `requests`
    requests at a time. Start its workers with multiprocessing_context="forkserver" where this process has read
    images before, for connections don't survive a fork.

    Raises: UsageError, StoreError where the source can't be listed, or holds no images.
    """

    def __init__(
        self,
        source: str | _Images,
        *,
        options: Mapping[str, Any] | None = None,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        requests: int = REQUESTS,
        cache_dir: str | Path | None = None,
        cache_gb: float = 20.0,
        deadline_s: float = 60.0,
    ) -> None:
        images = _listed(source, options or {}) if isinstance(source, str) else source
        self.location = images.location
        self.classes = list(images.classes)
        self.class_to_idx = {name: label for label, name in enumerate(images.classes)}
        self.transform, self.target_transform = transform, target_transform
        self._images, self._requests = images.images, requests
        cache = Cache(Path(cache_dir), int(cache_gb * 1e9)) if cache_dir is not None else None
        self._reader = Reader(images.location, cache, Tries(deadline_s))

    @classmethod
    def of(cls, folder: S3ImageFolder, *, requests: int = REQUESTS, deadline_s: float = 60.0) -> Self:
        """The same images, classes, order and transforms as a dataset of dask-pytorch-ddp, without listing them."""
        images = [(Wanted(key), folder.class_to_idx[folder._get_class(key)]) for key in folder.all_files]  # noqa: SLF001
        location = Location(f"s3://{folder.s3_bucket}", {"anon": True} if folder.anon else {})
        return cls(
            _Images(location, folder.classes, images),
            transform=folder.transform,
            target_transform=folder.target_transform,
            requests=requests,
            deadline_s=deadline_s,
        )

    @property
    def keys(self) -> list[str]:
        """Of each image, below the source."""
        return [wanted.key for wanted, _ in self._images]

    @property
    def labels(self) -> list[int]:
        """Of each image: places in `classes`, before target_transform."""
        return [label for _, label in self._images]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """One image and its label. Raises: UnreadableImage."""
        return self._sample(index, self._reader.read(self._images[index][0]))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Some, in the order of `indices`; what has come is decoded while others come. Raises: UnreadableImage."""
        samples: dict[int, tuple[Any, Any]] = {}
        wanted = [self._images[index][0] for index in indices]
        for place, data in self._reader.read_all(wanted, self._requests):
            samples[place] = self._sample(indices[place], data)
        return [samples[place] for place in range(len(indices))]

    def _sample(self, index: int, data: bytes | ReadFault) -> tuple[Any, Any]:
        wanted, label = self._images[index]
        if isinstance(data, ReadFault):
            raise UnreadableImage(f"{self.location.words}/{wanted.key}: {data.reason}")
        try:
            image: Any = Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise UnreadableImage(f"{self.location.words}/{wanted.key}: {error}") from error
        if self.transform is not None:
            image = self.transform(image)
        return image, label if self.target_transform is None else self.target_transform(label)


def _listed(source: str, options: Mapping[str, Any]) -> _Images:
    location = Location.at(_Source(source, dict(options)))
    by_class = listed_here(location) if location.protocol in SURVIVE_A_FORK else listed_elsewhere(location)
    classes = sorted(by_class)
    images = [
        (Wanted(key, size_bytes, version), label)
        for label, name in enumerate(classes)
        for key, size_bytes, version in sorted(by_class[name])
    ]
    return _Images(location, classes, images)
