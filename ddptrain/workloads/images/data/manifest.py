"""The list of a run's images, made once: every rank and every resume reads the same order, classes and split."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddptrain.config.wording import shown
from ddptrain.errors import UsageError
from ddptrain.file_ops import write_atomic
from ddptrain.storage.base import UNKNOWN_SIZE, Location
from ddptrain.workloads.images.data.source_layout import is_split_folder

if TYPE_CHECKING:
    from ddptrain.workloads.images.params import ImagesParams

FILE = "manifest.json"
_SCHEMA = 1

_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Key = Annotated[str, Field(min_length=3, max_length=4096)]
_Index = Annotated[int, Field(ge=0)]


_FIELDS = ("url", "val_url", "made_of", "classes", "keys", "labels", "sizes", "versions", "train", "val")


class DamagedManifest(UsageError):
    """The list of images is not what the driver has written."""


class _File(BaseModel):
    """What the file holds. Nothing in it is believed before it has been checked."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_: Literal[1] = Field(alias="schema")
    url: _Name
    val_url: Annotated[str, Field(max_length=1024)] = ""
    made_of: dict[str, Any]
    classes: Annotated[tuple[_Name, ...], Field(min_length=1)]
    keys: Annotated[tuple[_Key, ...], Field(min_length=1)]
    labels: tuple[_Index, ...]
    sizes: tuple[Annotated[int, Field(ge=UNKNOWN_SIZE)], ...]
    versions: tuple[Annotated[str, Field(max_length=1024)], ...]
    train: Annotated[tuple[_Index, ...], Field(min_length=1)]
    val: tuple[_Index, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The images of a run, and what each is for.

    keys, labels, sizes, versions: one entry an image, ordered by class, then by key; where a folder of its own holds
    the images to validate with, these come last. Keys are relative to the source, CLASS/IMAGE or, of a split source,
    PART/CLASS/IMAGE; sizes in bytes, -1 and "" where the store has told neither. train, val: indices into them,
    ascending. `url` has no credentials; `made_of` are the parameters that decided all this.
    `val_url` is the location that keys of `val` are relative to; "" where that is the source.
    """

    url: str
    classes: tuple[str, ...]
    keys: tuple[str, ...]
    labels: tuple[int, ...]
    sizes: tuple[int, ...]
    versions: tuple[str, ...]
    train: tuple[int, ...]
    val: tuple[int, ...]
    made_of: Mapping[str, object] = field(default_factory=dict)
    val_url: str = ""

    def location(self, params: ImagesParams) -> Location:
        """Where to read the images: a folder as the driver has found it, a URL as the parameters have it."""
        here = Location.at(params)
        return Location(self.url, here.options) if here.protocol == "file" else here

    def val_location(self, params: ImagesParams) -> Location | None:
        """Where to read the images to validate with, as `location` does; None where they are in the source."""
        if not self.val_url:
            return None
        here = Location.of(params.val_source or self.val_url, params.source_options)
        return Location(self.val_url, here.options) if here.protocol == "file" else here

    def in_val_source(self, index: int) -> bool:
        """Whether an image is read from `val_url`."""
        return bool(self.val_url) and index >= self.val[0]

    def name(self, index: int) -> str:
        """An image as people know it: its key, and where it lies if that is not the source."""
        return f"{self.val_url}/{self.keys[index]}" if self.in_val_source(index) else self.keys[index]

    def write(self, folder: Path) -> None:
        """Write it into a folder, as a whole or not at all."""
        document = {"schema": _SCHEMA, **{name: getattr(self, name) for name in _FIELDS}}
        write_atomic(folder / FILE, (json.dumps(document, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The one of a folder.

        Raises: DamagedManifest where it is missing, or is not what a driver writes.
        """
        path = folder / FILE
        try:
            found = _File.model_validate_json(path.read_bytes())
        except OSError as error:
            raise DamagedManifest(f"the list of images {path} can't be read: {error}") from error
        except ValidationError as error:
            raise _damaged(path, _first(error)) from None
        manifest = cls(**{name: getattr(found, name) for name in _FIELDS})
        if problem := _problem(manifest):
            raise _damaged(path, problem)
        return manifest


def is_plain_key(key: str) -> bool:
    """Whether a key stays below the folder that it is joined to, and has a class in front."""
    parts = key.split("/")
    return len(parts) > 1 and not {"", ".", ".."} & set(parts) and "\0" not in key


def is_of_class(key: str, name: str) -> bool:
    """Whether a key is CLASS/IMAGE of that class or, of a split source, PART/CLASS/IMAGE."""
    first, *below = key.split("/")
    return first == name or (is_split_folder(first) and len(below) > 1 and below[0] == name)


def _damaged(path: Path, problem: str) -> DamagedManifest:
    return DamagedManifest(f"the list of images {path} is damaged: {problem}; delete it to have the source listed anew")


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{where}: {shown(first['msg'], 120)}"


def _problem(manifest: Manifest) -> str:
    """What is wrong between fields that are each of their form; "" where nothing is."""
    n = len(manifest.keys)
    for name in ("labels", "sizes", "versions"):
        if len(getattr(manifest, name)) != n:
            return f"{len(getattr(manifest, name))} {name} for {n} keys"
    if not _ascends(manifest.classes):
        return "its classes are not in order, or repeated"
    for key, label in zip(manifest.keys, manifest.labels, strict=True):
        if not is_plain_key(key):
            return f'the key "{shown(key)}" leads out of the source'
        if label >= len(manifest.classes) or not is_of_class(key, manifest.classes[label]):
            return f'the key "{shown(key)}" does not belong to class {label}'
    if problem := _split_problem(manifest, n):
        return problem
    names = {(manifest.in_val_source(index), key) for index, key in enumerate(manifest.keys)}
    return "" if len(names) == n else "a key is repeated"


def _split_problem(manifest: Manifest, n: int) -> str:
    for name in ("train", "val"):
        part: Sequence[int] = getattr(manifest, name)
        if not _ascends(part) or (part and part[-1] >= n):
            return f"{name} is not a list of images in order"
    if manifest.val_url and (not manifest.val or manifest.val[0] <= manifest.train[-1] or manifest.val[-1] != n - 1):
        return "val does not follow train"
    return "an image is in train and in val" if set(manifest.train) & set(manifest.val) else ""


def _ascends(items: Sequence[Any]) -> bool:
    return all(first < second for first, second in pairwise(items))
