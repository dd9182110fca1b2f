"""Reads the manifests of checkpoints (checkpoint.json), and finds the newest checkpoint that matches its manifest."""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.file_ops import hash_file
from ddptrain.results.errors import CheckpointDamaged, ResultsError
from ddptrain.results.layout import MANIFEST, RunLayout, checkpoint_folders
from ddptrain.results.metrics import finite_number
from ddptrain.results.secure_files import read_bytes

# The file is missing, or is another kind of file. Other errors (EIO, ESTALE) say nothing about the checkpoint.
_DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EFBIG)
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # a minute


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
        finite=manifest.get("finite") is not False,
    )


def newest_verified(layout: RunLayout, warn: Callable[[str], None]) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that matches its manifest, or None; `warn` is called for each one that is skipped.

    One that is not finite is returned only if there is no other one. Raises ResultsError if the file system fails for a
    minute: an older checkpoint would lose work that may be intact.
    """
    not_finite = []
    for folder in checkpoint_folders(layout):
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


def parse_manifest(data: bytes) -> dict[str, Any] | None:
    """Parse a manifest.

    Returns None for other data, for a field that is missing or of another type, and for a file name that would lead
    out of the checkpoint's folder.
    """
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and _is_complete(manifest) else None


def metrics_in(manifest: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a parsed manifest; a value that was not finite is null there, and NaN here."""
    return {
        name: math.nan if value is None else value
        for name, value in manifest["metrics"].items()
        if value is None or finite_number(value) is not None
    }


def is_plain_name(name: object) -> bool:
    """Return whether a file of a checkpoint may have this name: no folder, no control character, not the manifest."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", "..", MANIFEST):
        return False
    return "\\" not in name and name.isprintable()


def _manifest(folder: Path) -> dict[str, Any]:
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


def _is_complete(manifest: dict[str, Any]) -> bool:
    if "epoch" not in manifest or not isinstance(manifest.get("metrics"), dict):
        return False
    if manifest["epoch"] is not None and finite_number(manifest["epoch"]) is None:
        return False
    if not (_is_count(manifest.get("step")) and _is_count(manifest.get("world_size"))):
        return False
    files = manifest.get("files")
    return isinstance(files, list) and bool(files) and all(map(_is_file, files))


def _is_file(file: object) -> bool:
    return (
        isinstance(file, dict)
        and is_plain_name(file.get("name"))
        and _is_count(file.get("size_bytes"))
        and isinstance(file.get("sha256"), str)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
