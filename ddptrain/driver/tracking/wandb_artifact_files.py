"""Finds the checkpoints and tables of a run directory that `results sync` logs as artifacts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, verify
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.layout import MANIFEST, RunLayout, checkpoint_folders
from ddptrain.results.recorded_config import parsed_config
from ddptrain.results.secure_files import read_bytes

_TABLE = re.compile(r"(?:step-(?P<step>\d{1,18})-)?rank-(?P<rank>\d{1,9})\.csv")


@dataclass(frozen=True, slots=True)
class WandbSettings:
    """The part of tracking.wandb of a run's recorded configuration that says which artifacts W&B gets."""

    checkpoints: bool = False
    tables: bool = True
    table_rows: int = 1000


def wandb_settings(layout: RunLayout) -> WandbSettings:
    """Return the settings of a run; the defaults if config.yaml is missing or damaged."""
    try:
        section = parsed_config(read_bytes(layout.config_yaml)).get("tracking")
    except OSError:
        section = None
    known = section.get("wandb") if isinstance(section, Mapping) else None
    known = known if isinstance(known, Mapping) else {}
    rows = known.get("table_rows")
    return WandbSettings(
        known.get("checkpoints") is True, known.get("tables") is not False, rows if isinstance(rows, int) else 1000
    )


def kept_checkpoints(layout: RunLayout) -> list[VerifiedCheckpoint]:
    """Return the checkpoints that the run has kept and that match their manifests, the oldest first.

    Their `files` are without the manifest, as in the artifacts of an online run.
    """
    found = []
    for folder in checkpoint_folders(layout):
        try:
            checkpoint = verify(folder)
        except CheckpointDamaged:
            continue
        files = tuple(name for name in checkpoint.files if name != MANIFEST)
        if all(is_in(layout.root, folder / name) for name in files):
            found.append(replace(checkpoint, files=files))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def tables_of(layout: RunLayout, rank: int) -> list[tuple[str, int | None, str]]:
    """Return name, step and path below the run directory of each table that a rank has logged, by step."""
    return sorted(_tables(layout, rank), key=lambda table: (table[0], -1 if table[1] is None else table[1]))


def _tables(layout: RunLayout, rank: int) -> Iterator[tuple[str, int | None, str]]:
    folder = layout.artifacts_dir / "tables"
    for path in folder.rglob("*"):
        match = _TABLE.fullmatch(path.name)
        if match and int(match["rank"]) == rank and is_in(layout.root, path):
            name = path.parent.relative_to(folder).as_posix()
            yield name, int(match["step"]) if match["step"] else None, path.relative_to(layout.root).as_posix()


def is_in(root: Path, path: Path) -> bool:
    """Return whether `path`, which is below `root`, is a file to which no symbolic link below `root` leads."""
    return path.is_file() and path.resolve() == root.resolve() / path.relative_to(root)
