"""Images that were read before, in files of this host: shared by ranks and runs, within a size."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_HEADER = struct.Struct("<QI")  # bytes that follow, and their CRC-32
_UNFINISHED = ".new-"
_UNFINISHED_S = 3600.0  # after that, whoever wrote it is gone
_KEPT = 0.85  # share of the limit that is left when it has been reached
_UNCOUNTED = 1 / 64  # share of the limit that a process writes before it looks at the whole again


class Cache:
    """A folder of images, those dropped first that were used least recently.

    Any number of processes use one at a time: entries appear by renaming, and one process at a time drops some. With
    up to eight that write at once the size stays below `max_bytes`. Errors of the file system are not the caller's:
    what can't be read is not there, what can't be written is left out, and the first time `tell` gets the reason.
    """

    def __init__(self, folder: Path, max_bytes: int, tell: Callable[[str], None] | None = None) -> None:
        self._folder = folder
        self._tell = tell
        self._max_bytes = max_bytes
        self._uncounted = max_bytes  # so that the first write looks at what others have left
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[Path, int]]:
        return Cache, (self._folder, self._max_bytes)

    def get(self, url: str, key: str, version: str) -> bytes | None:
        """The image, if it is there and whole; a damaged one is dropped."""
        path = self._path(url, key, version)
        try:
            with path.open("rb", buffering=0) as file:
                content = file.read()
                with contextlib.suppress(OSError):  # of others, or on a disk that can't be written
                    os.utime(file.fileno())
        except OSError:
            return None
        data = content[_HEADER.size :]
        if content[: _HEADER.size] == _header(data):
            return data
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def put(self, url: str, key: str, version: str, data: bytes) -> None:
        """Keeps an image; nothing happens where it is too large for the cache, or the disk is full."""
        if (len(data) + _HEADER.size) * 8 > self._max_bytes:
            return
        path = self._path(url, key, version)
        new = path.with_name(f"{_UNFINISHED}{os.getpid()}-{next(self._numbers)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_bytes(_header(data) + data)
            os.replace(new, path)
        except OSError as error:
            tell, self._tell = self._tell, None
            if tell is not None:
                tell(f"images can't be kept in {self._folder}, see params.cache.dir: {error}")
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        self._count(len(data) + _HEADER.size)

    def _path(self, url: str, key: str, version: str) -> Path:
        name = hashlib.sha256(f"{url}\0{key}\0{version}".encode()).hexdigest()
        return self._folder / name[:2] / name

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self._uncounted += n_bytes
            if self._uncounted < self._max_bytes * _UNCOUNTED:
                return
            self._uncounted = 0
        with contextlib.suppress(OSError), self._alone() as alone:
            if alone:
                self._shrink()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other process drops entries meanwhile; one that does, does it for all."""
        with (self._folder / ".lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _shrink(self) -> None:
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total <= self._max_bytes * (1 - 8 * _UNCOUNTED):
            return
        for _, size, path in entries:
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= self._max_bytes * _KEPT:
                break

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """(last use, size, path) of each entry; what a killed process has left half-written is dropped."""
        for folder in self._folder.iterdir():
            if len(folder.name) != 2:
                continue
            for entry in os.scandir(folder):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if not entry.name.startswith(_UNFINISHED):
                        yield status.st_mtime_ns, status.st_size, entry.path
                    elif status.st_mtime < time.time() - _UNFINISHED_S:
                        os.unlink(entry.path)


def _header(data: bytes) -> bytes:
    return _HEADER.pack(len(data), zlib.crc32(data))
