"""A torch dataset for folders of images in any store, for users' own training code; it reads with many requests."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from PIL import Image
from torch.utils.data import Dataset

from ddptrain.isolated import Isolated
from ddptrain.storage.store import UNKNOWN_SIZE, Listed, Location
from ddptrain.workloads.images.decode import FORMATS
from ddptrain.workloads.images.listing import list_images
from ddptrain.workloads.images.reader import REQUESTS, SURVIVE_A_FORK, Cache, Reader, ReadFailure

if TYPE_CHECKING:
    from dask_pytorch_ddp.data import S3ImageFolder

Transform = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Images:
    """The images of a source, each with its label."""

    location: Location
    classes: Sequence[str]
    images: Sequence[tuple[Listed, int]]


class UnreadableImage(OSError):
    """An image can't be read or decoded; the message has its name and the reason."""


class ImageFolder(Dataset[tuple[Any, Any]]):
    """The images below `source`, stored as CLASS/IMAGE, as (image, label), ordered by class and key.

    `source` is a folder or a URL (s3://, gs://, az://, https://, ...); `options` are fsspec's options of the store.
    Images are RGB images of pillow before `transform`. A DataLoader requests whole batches, which are read with
    `requests` concurrent requests. If this process has read images before, start the workers of the DataLoader with
    multiprocessing_context="forkserver": connections can't be used after a fork.

    Raises: UsageError, StoreError if the source can't be listed or contains no images.
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
        self._reader = Reader(images.location, cache, deadline_s)

    @classmethod
    def of(cls, folder: S3ImageFolder, *, requests: int = REQUESTS, deadline_s: float = 60.0) -> Self:
        """The same images, classes, order and transforms as a dataset of dask-pytorch-ddp; nothing is listed again."""
        labels = [folder.class_to_idx[folder._get_class(key)] for key in folder.all_files]  # noqa: SLF001
        images = [(Listed(key, UNKNOWN_SIZE, ""), label) for key, label in zip(folder.all_files, labels, strict=True)]
        location = Location(f"s3://{folder.s3_bucket}", {"skip_signature": True} if folder.anon else {})
        return cls(
            _Images(location, folder.classes, images),
            transform=folder.transform,
            target_transform=folder.target_transform,
            requests=requests,
            deadline_s=deadline_s,
        )

    @property
    def keys(self) -> list[str]:
        """The key of each image, relative to the source."""
        return [ref.key for ref, _ in self._images]

    @property
    def labels(self) -> list[int]:
        """The label of each image, an index into `classes`, before target_transform."""
        return [label for _, label in self._images]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return an image and its label. Raises UnreadableImage."""
        return self._sample(index, self._reader.read(self._images[index][0]))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return images in the order of `indices`, decoded as they arrive. Raises UnreadableImage."""
        samples: dict[int, tuple[Any, Any]] = {}
        refs = [self._images[index][0] for index in indices]
        for place, data in self._reader.read_all(refs, self._requests):
            samples[place] = self._sample(indices[place], data)
        return [samples[place] for place in range(len(indices))]

    def _sample(self, index: int, data: bytes | ReadFailure) -> tuple[Any, Any]:
        ref, label = self._images[index]
        if isinstance(data, ReadFailure):
            raise UnreadableImage(f"{self.location.description}/{ref.key}: {data.reason}")
        try:
            image: Any = Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise UnreadableImage(f"{self.location.description}/{ref.key}: {error}") from error
        if self.transform is not None:
            image = self.transform(image)
        return image, label if self.target_transform is None else self.target_transform(label)


def _listed(source: str, options: Mapping[str, Any]) -> _Images:
    location = Location.of(source, options)
    rows: list[Any] = []
    if location.protocol in SURVIVE_A_FORK:
        send_images([location.url, dict(location.options)], rows.append)
    else:  # this process stays free of connections, so that a DataLoader can fork it
        with Isolated(f"{__name__}:send_images", [location.url, dict(location.options)]) as process:
            rows += process.answers()
    classes = [name for name, _ in rows]
    images = [(Listed(*image), label) for label, (_, found) in enumerate(rows) for image in found]
    return _Images(location, classes, images)


def send_images(request: Sequence[Any], send: Callable[[Any], None]) -> None:
    """Send each class with its images, sorted: key, size in bytes, version. Raises UsageError, StoreError."""
    by_class = list_images(Location(*request)).by_class
    for name, items in sorted(by_class.items()):
        send([name, sorted((item.key, item.size_bytes, item.version) for item in items)])
