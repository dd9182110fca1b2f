"""The manifest: a run's list of images, made once. All ranks and resumes use the same order, classes and split."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import write_atomic
from ddptrain.storage.store import UNKNOWN_SIZE, Location
from ddptrain.workloads.images.params import ImagesParams

FILE = "manifest.json"
PARTS = frozenset({"train", "val", "test", "valid", "validation"})  # names of the parts of split data sets

_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Key = Annotated[str, Field(min_length=3, max_length=4096)]
_Index = Annotated[int, Field(ge=0)]


class DamagedManifest(UsageError):
    """The manifest is missing or is not one that the driver wrote."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The images of a run and their use.

    keys, labels, sizes, versions: one entry per image, ordered by class and key; validation images with a location of
    their own come last. Keys are relative to the source: CLASS/IMAGE or, in a split source, PART/CLASS/IMAGE. Sizes
    are in bytes; -1 and "" mean that the store did not report a size or version. train, val: ascending indices into
    them. `url` has no credentials. `made_of`: the parameters that determined the list. `val_url`: the location that
    keys of `val` are relative to; "" if it is the source.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    url: _Name
    classes: Annotated[tuple[_Name, ...], Field(min_length=1)]
    keys: Annotated[tuple[_Key, ...], Field(min_length=1)]
    labels: tuple[_Index, ...]
    sizes: tuple[Annotated[int, Field(ge=UNKNOWN_SIZE)], ...]
    versions: tuple[Annotated[str, Field(max_length=1024)], ...]
    train: Annotated[tuple[_Index, ...], Field(min_length=1)]
    val: tuple[_Index, ...]
    made_of: Mapping[str, Any] = field(default_factory=dict)
    val_url: Annotated[str, Field(max_length=1024)] = ""
    schema: Literal[1] = 1

    def location(self, params: ImagesParams) -> Location:
        """Return where to read the images: a local folder as the driver resolved it, a URL as in the parameters."""
        chosen = Location.of(params.source, params.source_options)
        return Location(self.url, chosen.options) if chosen.protocol == "file" else chosen

    def val_location(self, params: ImagesParams) -> Location | None:
        """Return where to read the validation images, as `location`; None if they are in the source."""
        if not self.val_url:
            return None
        chosen = Location.of(params.val_source or self.val_url, params.source_options, "params.val_source")
        return Location(self.val_url, chosen.options) if chosen.protocol == "file" else chosen

    def in_val_source(self, index: int) -> bool:
        """Return whether an image is read from `val_url`."""
        return bool(self.val_url) and index >= self.val[0]

    def name(self, index: int) -> str:
        """Return the name of an image in messages: its key, with its location if that is not the source."""
        return f"{self.val_url}/{self.keys[index]}" if self.in_val_source(index) else self.keys[index]

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder atomically."""
        document = {item.name: getattr(self, item.name) for item in fields(self)}
        write_atomic(folder / FILE, (json.dumps(document, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a folder. Raises DamagedManifest if it is missing or invalid."""
        path = folder / FILE
        try:
            manifest = TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise DamagedManifest(f"the list of images {path} can't be read: {error}") from error
        except ValidationError as error:
            raise _damaged(path, _first(error)) from None
        if problem := _problem(manifest):
            raise _damaged(path, problem)
        return manifest


def is_plain_key(key: str) -> bool:
    """Return whether a key has a class folder and stays below the folder that it is joined to."""
    parts = key.split("/")
    return len(parts) > 1 and not {"", ".", ".."} & set(parts) and "\0" not in key


def is_of_class(key: str, name: str) -> bool:
    """Return whether a key is CLASS/IMAGE of that class or, in a split source, PART/CLASS/IMAGE."""
    first, *below = key.split("/")
    return first == name or (first.lower() in PARTS and len(below) > 1 and below[0] == name)


def _damaged(path: Path, problem: str) -> DamagedManifest:
    return DamagedManifest(
        f"the list of images {path} is damaged: {problem}; delete it, and the source is listed again"
    )


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{where}: {shorten(first['msg'], 120)}"


def _problem(manifest: Manifest) -> str:
    """Return what is inconsistent between valid fields; "" if nothing is."""
    n = len(manifest.keys)
    for name in ("labels", "sizes", "versions"):
        if len(getattr(manifest, name)) != n:
            return f"{len(getattr(manifest, name))} {name} for {n} keys"
    if not _ascends(manifest.classes):
        return "its classes are not in order, or repeated"
    for key, label in zip(manifest.keys, manifest.labels, strict=True):
        if not is_plain_key(key):
            return f'the key "{shorten(key)}" leads out of the source'
        if label >= len(manifest.classes) or not is_of_class(key, manifest.classes[label]):
            return f'the key "{shorten(key)}" does not belong to class {label}'
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
