"""Stages files of a rank for the driver, which moves them from the staging folder to the run directory."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ddptrain.file_ops import hash_file
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.emitter import Emitter


def stays_below(path: str) -> bool:
    """Return whether a relative path stays below its folder. The driver checks the path again, more strictly."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/")


class ArtifactFiles:
    """Stages files of this rank and announces them to the driver."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec = spec
        self._emitter = emitter
        self._counter = itertools.count()

    def new_staging(self, kind: str) -> Path:
        """Return a new path in the staging folder; its name begins with `kind`."""
        return Path(self._spec.host.staging) / f"{kind}-{next(self._counter)}"

    def save(self, path: str, data: bytes | str | Path, before_announce: Callable[[Path], None] | None = None) -> None:
        """Stage a file for artifacts/`path`. `before_announce` is called with it before the driver can move it."""
        if not stays_below(path):
            raise ValueError(f"ctx.save_file takes a path below artifacts/, such as 'samples/a.txt', not {path!r}")
        staged = self.new_staging("file")
        if isinstance(data, Path):
            shutil.copyfile(data, staged)
        else:
            staged.write_bytes(data.encode() if isinstance(data, str) else data)
        if before_announce is not None:
            before_announce(staged)
        self.announce(path, staged)

    def announce(self, path: str, staged: Path, area: str = "artifacts") -> None:
        """Announce a complete staged file to the driver, for `path` below `area`. Raises OSError."""
        size, digest = hash_file(staged)
        self._emitter.emit(events.FileSaved(time.time_ns(), path, staged.name, size, digest, area))
