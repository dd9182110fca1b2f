"""Reads the manifests of checkpoints (checkpoint.json), and finds the newest checkpoint that matches its manifest."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, NotRequired

from annotated_types import MinLen, Predicate
from pydantic import ConfigDict, FiniteFloat, NonNegativeInt, TypeAdapter
from typing_extensions import TypedDict

from ddptrain.file_ops import hash_file
from ddptrain.results.errors import CheckpointDamaged, ResultsError
from ddptrain.results.layout import MANIFEST, checkpoint_folders
from ddptrain.results.run import Run
from ddptrain.results.secure_files import read_bytes

# The file is missing, or is another kind of file. Other errors (EIO, ESTALE) say nothing about the checkpoint.
_DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EFBIG)
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # a minute


def is_plain_name(name: str) -> bool:
    """Return whether a file of a checkpoint may have this name: no folder, no control character, not the manifest."""
    return name == Path(name).name and name not in ("", "..", MANIFEST) and "\\" not in name and name.isprintable()


class ManifestFile(TypedDict):
    """A file of a checkpoint in its manifest."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    name: Annotated[str, Predicate(is_plain_name)]
    size_bytes: NonNegativeInt
    sha256: str


class Manifest(TypedDict):
    """The content of checkpoint.json; fields of newer versions are kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    step: NonNegativeInt
    epoch: FiniteFloat | None
    world_size: NonNegativeInt
    metrics: dict[str, FiniteFloat | None]
    files: Annotated[list[ManifestFile], MinLen(1)]
    finite: NotRequired[bool]
    stored_as: NotRequired[
        dict[str, Annotated[str, Predicate(is_plain_name)]]
    ]  # in a store: the names of the objects that differ from the names of the files


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose files have the sizes and hashes of its manifest.

    A metric that is not finite is NaN, whatever it was. finite: see retention.are_finite.
    """

    folder: Path
    step: int
    epoch: float | None
    world_size: int
    metrics: dict[str, float]
    files: tuple[str, ...]
    finite: bool = True

    @property
    def description(self) -> str:
        """Its step and epoch, for messages."""
        epoch = f", epoch {self.epoch:g}" if self.epoch is not None else ""
        return f"step {self.step}{epoch}"


def verify(folder: Path) -> VerifiedCheckpoint:
    """Read a checkpoint's manifest, and compare every file with its size and hash there.

    Raises CheckpointDamaged; ResultsError if the file system fails, so that nothing is known about the checkpoint.
    """
    for file in _manifest(folder)["files"]:
        _compare(folder / file["name"], file["size_bytes"], file["sha256"])
    return read_manifest(folder)


def read_manifest(folder: Path) -> VerifiedCheckpoint:
    """Read a checkpoint's manifest; its files are not checked. Raises CheckpointDamaged, ResultsError."""
    manifest = _manifest(folder)
    return VerifiedCheckpoint(
        folder=folder,
        step=manifest["step"],
        epoch=manifest["epoch"],
        world_size=manifest["world_size"],
        metrics=metrics_in(manifest),
        files=(*(file["name"] for file in manifest["files"]), MANIFEST),
        finite=manifest.get("finite", True),
    )


def newest_verified(run: Run, warn: Callable[[str], None]) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that matches its manifest, or None; `warn` is called for each one that is skipped.

    One that is not finite is returned only if there is no other one. Raises ResultsError if the file system fails for a
    minute: an older checkpoint would lose work that may be intact.
    """
    not_finite = []
    for folder in checkpoint_folders(run.checkpoints_dir):
        try:
            if read_manifest(folder).finite:
                checkpoint = _verify_patiently(folder, warn)
                break
            not_finite.append(folder)
        except CheckpointDamaged as error:
            warn(f"checkpoint {folder.name} is skipped: {error}")
    else:
        return _first_verified(not_finite, warn)
    for folder in not_finite:
        warn(f"checkpoint {folder.name} is skipped: its metrics or weights are NaN or infinite")
    return checkpoint


def _first_verified(folders: Sequence[Path], warn: Callable[[str], None]) -> VerifiedCheckpoint | None:
    for folder in folders:
        try:
            checkpoint = _verify_patiently(folder, warn)
        except CheckpointDamaged as error:
            warn(f"checkpoint {folder.name} is skipped: {error}")
        else:
            warn(f"the metrics or weights of checkpoint {folder.name} are NaN or infinite, and there is no other one")
            return checkpoint
    return None


def _verify_patiently(folder: Path, warn: Callable[[str], None]) -> VerifiedCheckpoint:
    for pause_s in _PAUSES_S:
        try:
            return verify(folder)
        except CheckpointDamaged:
            raise
        except ResultsError as error:
            warn(f"checkpoint {folder.name}: {error}; trying again in {pause_s:g} s")
            time.sleep(pause_s)
    return verify(folder)


def parse_manifest(data: bytes) -> Manifest | None:
    """Parse a manifest.

    Returns None for other data, for a field that is missing or of another type, and for a file name that would lead
    out of the checkpoint's folder.
    """
    with suppress(ValueError):
        return _adapter().validate_json(data, strict=True)
    return None


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def metrics_in(manifest: Manifest) -> dict[str, float]:
    """Return the metrics of a parsed manifest; a value that was not finite is null there, and NaN here."""
    return {name: math.nan if value is None else value for name, value in manifest["metrics"].items()}


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(read_bytes(path))
    except OSError as error:
        raise _unreadable(path, error) from error
    if manifest is None:
        raise CheckpointDamaged(
            f"{path} is damaged: it is not JSON, lists no files, or a field is missing or of another type"
        )
    return manifest


def _unreadable(path: Path, error: OSError) -> ResultsError:
    kind = CheckpointDamaged if error.errno in _DAMAGED else ResultsError
    return kind(f"cannot read {path}: {error.strerror}")


def _compare(path: Path, size_bytes: int, sha256: str) -> None:
    try:
        size = path.lstat().st_size
        if size != size_bytes:  # checked first: hashing reads the whole file
            raise CheckpointDamaged(f"{path.name} has {size} bytes, not {size_bytes}")
        _, digest = hash_file(path, safely=True)
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest != sha256:
        raise CheckpointDamaged(f"the SHA-256 of {path.name} is not the one in {MANIFEST}")
