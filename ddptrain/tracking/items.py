"""What ranks pass to trackers. Times are nanoseconds of the host's wall clock."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Numbers:
    """The values of one ctx.log call."""

    time_ns: int
    values: Mapping[str, float]
    step: int | None = None
    epoch: float | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a PNG file at `path`, which exists until the tracker's log() returns."""

    time_ns: int
    name: str
    path: Path
    caption: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers, text, None and images; each row is as long as `columns`."""

    time_ns: int
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float | str | bool | Image | None, ...], ...]
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint in `folder`, which exists until log() returns. For trackers with `checkpoints: true`."""

    time_ns: int
    step: int
    folder: Path
    metrics: Mapping[str, float]


Item = Numbers | Image | Table | Checkpoint


class SharedFiles:
    """Files or folders that are deleted when each of their `readers` has called release()."""

    def __init__(self, paths: Sequence[Path], readers: int) -> None:
        self._paths = paths
        self._readers = readers
        self._lock = threading.Lock()

    def release(self) -> None:
        """Count a reader as done; after the last one, delete the files. Never raises."""
        with self._lock:
            self._readers -= 1
            if self._readers > 0:
                return
        for path in self._paths:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if the file system does not allow one. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
