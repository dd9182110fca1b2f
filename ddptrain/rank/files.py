"""Files that a rank hands over: they wait in its staging folder until the driver has taken them."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.checkpoint import files
from ddptrain.rank.emitter import Emitter


def stays_below(path: str) -> bool:
    """Whether the path names a file below the folder it is joined to; the driver checks again, and more strictly."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/")


class Files:
    """Stages files of this rank, and tells the driver of them."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec = spec
        self._emitter = emitter
        self._counter = itertools.count()

    def new_staging(self, kind: str) -> Path:
        """A path in the staging folder that nobody else has."""
        return Path(self._spec.host.staging) / f"{kind}-{next(self._counter)}"

    def save(self, path: str, data: bytes | str | Path, lend: Callable[[Path], None] | None = None) -> None:
        """Hand over a file for artifacts/`path`; `lend` is called with the file before the driver may take it away.

        Raises:
            ValueError: the path would leave the run directory.
            OSError: the file can't be read, or the staging disk is full.
        """
        if not stays_below(path):
            raise ValueError(f"ctx.save_file takes a path below artifacts/, such as 'samples/a.txt', not {path!r}")
        staged = self.new_staging("file")
        if isinstance(data, Path):
            shutil.copyfile(data, staged)
        else:
            staged.write_bytes(data.encode() if isinstance(data, str) else data)
        if lend is not None:
            lend(staged)
        self.announce(str(path), staged)

    def announce(self, path: str, staged: Path, area: str = "artifacts") -> None:
        """Tell the driver of a file that is complete. Raises OSError."""
        size, digest = files.hash_file(staged)
        self._emitter.emit(events.FileSaved(time.time_ns(), path, staged.name, size, digest, area))
