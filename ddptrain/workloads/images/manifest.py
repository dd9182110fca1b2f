"""The manifest: a run's list of images, made once. All ranks and resumes use the same order, classes and split.

In memory it is a table with 25 bytes for an image, and all keys one after another: a list of a million strings, tuples
and numbers would cost each rank 300 MB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import sha256, write_atomic
from ddptrain.storage.store import UNKNOWN_SIZE, Listed, Location
from ddptrain.workloads.images.params import ImagesParams

FILE = "manifest.json"
PARTS = frozenset({"train", "val", "test", "valid", "validation"})  # names of the parts of split data sets
UNUSED, TRAIN, VAL = 0, 1, 2  # what an image is for
# end: where its key ends. version: the first 4 bytes of the SHA-256 of what the store calls its version, 0 for none.
_ROW = np.dtype([("end", "<u8"), ("size", "<i8"), ("version", "<u4"), ("label", "<i4"), ("part", "u1")])
_SHORT = re.compile("~[0-9a-f]{8}")  # such a version, in the file

_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Key = Annotated[str, Field(min_length=3, max_length=4096)]
_Index = Annotated[int, Field(ge=0)]
_Label = Annotated[int, Field(ge=0, lt=1 << 31)]
_Size = Annotated[int, Field(ge=UNKNOWN_SIZE, lt=1 << 63)]


class DamagedManifest(UsageError):
    """The manifest is missing or is not one that the driver wrote."""


@dataclass(frozen=True, slots=True)
class _File:
    """What manifest.json has: see Manifest. keys, labels, sizes, versions: one entry for each image."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    url: _Name
    classes: Annotated[tuple[_Name, ...], Field(min_length=1)]
    keys: Annotated[tuple[_Key, ...], Field(min_length=1)]
    labels: tuple[_Label, ...]
    sizes: tuple[_Size, ...]
    versions: tuple[Annotated[str, Field(max_length=1024)], ...]
    train: Annotated[tuple[_Index, ...], Field(min_length=1)]
    val: tuple[_Index, ...]
    made_of: Mapping[str, Any] = field(default_factory=dict)
    val_url: Literal[""] = ""  # of an earlier version
    schema: Literal[1] = 1


class Keys(Sequence[str]):
    """The keys of all images, decoded when they are asked for."""

    def __init__(self, ends: NDArray[np.uint64], blob: bytes) -> None:
        self._ends, self._blob = ends, blob

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        """Return a key: relative to the source, CLASS/IMAGE or, in a split source, PART/CLASS/IMAGE."""
        end = int(self._ends[index])
        start = int(self._ends[index - 1]) if index % len(self) else 0
        return self._blob[start:end].decode()


@dataclass(frozen=True, eq=False)
class Manifest:
    """The images of a run and their use, ordered by class and key; validation images of a split source come last.

    rows: a row of _ROW for each image; its size in bytes is -1 if the store did not report it. blob: the keys.
    `url` has no credentials. `made_of`: the parameters that determined the list.
    """

    url: str
    classes: tuple[str, ...]
    rows: NDArray[np.void]
    blob: bytes = field(repr=False)
    made_of: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        url: str,
        classes: Sequence[str],
        images: Iterable[tuple[Listed, int, int]],
        made_of: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the manifest of images, each with its label and what it is for."""
        items, labels, parts = zip(*images, strict=True)
        columns = ([item.key for item in items], labels, [item.size_bytes for item in items])
        return cls._made(url, classes, *columns, [item.version for item in items], parts, made_of or {})

    @classmethod
    def _made(
        cls,
        url: str,
        classes: Sequence[str],
        keys: Sequence[str],
        labels: Sequence[int],
        sizes: Sequence[int],
        versions: Sequence[str],
        parts: ArrayLike,
        made_of: Mapping[str, Any],
    ) -> Self:
        rows = np.empty(len(keys), _ROW)
        rows["end"] = np.cumsum(np.fromiter((len(key.encode()) for key in keys), np.uint64, len(keys)))
        rows["size"], rows["label"], rows["part"] = sizes, labels, parts
        rows["version"] = np.fromiter(map(_short, versions), np.uint32, len(keys))
        return cls(url, tuple(classes), rows, "".join(keys).encode(), made_of)

    @cached_property
    def keys(self) -> Keys:
        """The key of each image."""
        return Keys(self.rows["end"], self.blob)

    @property
    def labels(self) -> NDArray[np.int32]:
        """The class of each image, an index into `classes`."""
        labels: NDArray[np.int32] = self.rows["label"]
        return labels

    @cached_property
    def train(self) -> NDArray[np.int32]:
        """The images to train with: ascending indices."""
        return np.flatnonzero(self.rows["part"] == TRAIN).astype(np.int32)

    @cached_property
    def val(self) -> NDArray[np.int32]:
        """The images to validate with: ascending indices."""
        return np.flatnonzero(self.rows["part"] == VAL).astype(np.int32)

    def image(self, index: int) -> Listed:
        """Return an image; its version is short, "" for none."""
        row = self.rows[index]
        version = int(row["version"])
        return Listed(self.keys[index], int(row["size"]), f"~{version:08x}" if version else "")

    def validating_on(self, images: NDArray[np.int32]) -> Self:
        """Return the manifest that trains with nothing, and validates with these images."""
        rows = self.rows.copy()
        rows["part"] = UNUSED
        rows["part"][images] = VAL
        return replace(self, rows=rows)

    def location(self, params: ImagesParams) -> Location:
        """Return where to read the images: a local folder as the driver resolved it, a URL as in the parameters."""
        chosen = Location.of(params.source, params.source_options)
        return Location(self.url, chosen.options) if chosen.protocol == "file" else chosen

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder atomically."""
        images = [self.image(index) for index in range(len(self.rows))]
        file = _File(
            self.url,
            self.classes,
            tuple(image.key for image in images),
            tuple(self.labels.tolist()),
            tuple(image.size_bytes for image in images),
            tuple(image.version for image in images),
            tuple(self.train.tolist()),
            tuple(self.val.tolist()),
            self.made_of,
        )
        document = {item.name: getattr(file, item.name) for item in fields(file)}
        write_atomic(folder / FILE, (json.dumps(document, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a folder. Raises DamagedManifest if it is missing or invalid."""
        path = folder / FILE
        try:
            file = TypeAdapter(_File).validate_json(path.read_bytes())
        except OSError as error:
            raise DamagedManifest(f"the list of images {path} can't be read: {error}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise _damaged(path, f"{where}: {shorten(first['msg'], 120)}") from None
        if problem := _problem(file):
            raise _damaged(path, problem)
        part = np.zeros(len(file.keys), np.uint8)
        part[list(file.train)], part[list(file.val)] = TRAIN, VAL
        columns = file.keys, file.labels, file.sizes, file.versions, part
        return cls._made(file.url, file.classes, *columns, file.made_of)


def _short(version: str) -> int:
    if not version:
        return 0
    short = version[1:] if _SHORT.fullmatch(version) else sha256(version.encode(errors="surrogatepass")).hexdigest()[:8]
    return int(short, 16)


def is_plain_key(key: str) -> bool:
    """Return whether a key has a class folder and stays below the folder that it is joined to."""
    parts = key.split("/")
    return len(parts) > 1 and not {"", ".", ".."} & set(parts) and "\0" not in key


def _damaged(path: Path, problem: str) -> DamagedManifest:
    return DamagedManifest(
        f"the list of images {path} is damaged: {problem}; delete it, and the source is listed again"
    )


def _problem(file: _File) -> str:
    """Return what is inconsistent between valid fields; "" if nothing is."""
    n = len(file.keys)
    for name in ("labels", "sizes", "versions"):
        if len(getattr(file, name)) != n:
            return f"{len(getattr(file, name))} {name} for {n} keys"
    if not _ascends(file.classes):
        return "its classes are not in order, or repeated"
    if bad_key := next((key for key in file.keys if not is_plain_key(key)), ""):
        return f'the key "{shorten(bad_key)}" leads out of the source'
    if max(file.labels) >= len(file.classes):
        return "a label is of no class"
    for name in ("train", "val"):
        part: Sequence[int] = getattr(file, name)
        if not _ascends(part) or (part and part[-1] >= n):
            return f"{name} is not a list of images in order"
    return "an image is in train and in val" if set(file.train) & set(file.val) else ""


def _ascends(items: Sequence[Any]) -> bool:
    return all(first < second for first, second in pairwise(items))
