"""Which checkpoint a run goes on from: the newest one that is what its manifest says."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.results.checkpoints import MANIFEST
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.files import read_bytes
from ddptrain.results.layout import RunLayout, step_of

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose files have the sizes and hashes of its manifest."""

    folder: Path
    step: int
    epoch: float | None
    world_size: int
    metrics: dict[str, float]
    files: tuple[str, ...]

    @property
    def words(self) -> str:
        """Where it stands, for messages."""
        epoch = f", epoch {self.epoch:g}" if self.epoch is not None else ""
        return f"step {self.step}{epoch}"


def verify(folder: Path) -> VerifiedCheckpoint:
    """Read a checkpoint's manifest and compare every file with it. Raises CheckpointDamaged."""
    for file in _manifest(folder)["files"]:
        _compare(folder / str(file["name"]), int(file["size_bytes"]), str(file["sha256"]))
    return read_manifest(folder)


def read_manifest(folder: Path) -> VerifiedCheckpoint:
    """What a checkpoint's manifest says; its files are not looked at. Raises CheckpointDamaged."""
    manifest = _manifest(folder)
    return VerifiedCheckpoint(
        folder=folder,
        step=int(manifest["step"]),
        epoch=manifest["epoch"],
        world_size=int(manifest["world_size"]),
        metrics={str(name): value for name, value in manifest["metrics"].items() if _is_finite(value)},
        files=(*(str(file["name"]) for file in manifest["files"]), MANIFEST),
    )


def newest_verified(layout: RunLayout, warn: Callable[[str], None]) -> VerifiedCheckpoint | None:
    """The newest checkpoint that is whole, or None; `warn` is told of those that are not, and passed over."""
    for folder in checkpoint_folders(layout):
        try:
            return verify(folder)
        except CheckpointDamaged as error:
            warn(f"checkpoint {folder.name} is passed over: {error}")
    return None


def checkpoint_folders(layout: RunLayout) -> list[Path]:
    """The folders of a run's checkpoints, newest first, whole or not."""
    if not layout.checkpoints_dir.is_dir():
        return []
    by_step = {step: path for path in layout.checkpoints_dir.iterdir() if (step := step_of(path.name)) is not None}
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_bytes(path))
    except OSError as error:
        raise CheckpointDamaged(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is damaged: it is not JSON") from error
    if not isinstance(manifest, dict) or not _is_complete(manifest):
        raise CheckpointDamaged(f"{path} is damaged: it lists no files, or a field is missing or of another type")
    return manifest


def _is_complete(manifest: dict[str, Any]) -> bool:
    """Whether all fields that are read later are there, and what they should be."""
    files = manifest.get("files")
    return (
        _is_count(manifest.get("step"))
        and _is_count(manifest.get("world_size"))
        and ("epoch" in manifest and (manifest["epoch"] is None or _is_finite(manifest["epoch"])))
        and isinstance(manifest.get("metrics"), dict)
        and (isinstance(files, list) and bool(files) and all(map(_is_file, files)))
    )


def _is_file(file: object) -> bool:
    if not isinstance(file, dict) or not isinstance(name := file.get("name"), str):
        return False
    plain = name == Path(name).name and name not in ("", ".", "..", MANIFEST) and name.isprintable()
    return plain and _is_count(file.get("size_bytes")) and isinstance(file.get("sha256"), str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _compare(path: Path, size_bytes: int, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        found = path.stat().st_size
        if found != size_bytes:
            raise CheckpointDamaged(f"{path.name} has {found} bytes, not {size_bytes}")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointDamaged(f"cannot read {path}: {error.strerror}") from error
    if digest.hexdigest() != sha256:
        raise CheckpointDamaged(f"the SHA-256 of {path.name} is not the one in {MANIFEST}")
