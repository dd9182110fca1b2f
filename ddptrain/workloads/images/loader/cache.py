"""Images that were read before, in files of this host: shared by ranks and runs, within a size."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ddptrain.file_ops import publish, sha256, try_lock

_HEADER = struct.Struct("<QI")  # bytes that follow, and their CRC-32
_UNFINISHED = ".new-"
_UNFINISHED_S = 3600.0  # after that, whoever wrote it is gone
_LOOK = struct.Struct("<Q")  # in the lock's file: bytes of all entries, as the last look has left them
_FULL, _KEPT = 0.875, 0.85  # shares of the limit: from which on a look drops entries, and what it leaves
_WRITERS = 10  # what is free is shared out among that many


class Cache:
    """A folder of images, those dropped first that were used least recently.

    Any number of processes use one at a time: entries appear by renaming, and one process at a time looks at the whole
    and drops some. A process may write a tenth of what the last look of any has found free, and what is more only when
    it has looked itself; where another is about it, its image is left out. So up to nine that write at once stay below
    `max_bytes`, and nobody waits. Errors of the file system are not the caller's: what can't be read is not there, what
    can't be written is left out, and the first time `tell` gets the reason.
    """

    def __init__(self, folder: Path, max_bytes: int, tell: Callable[[str], None] | None = None) -> None:
        self._folder = folder
        self._tell = tell
        self._max_bytes = max_bytes
        self._has_looked = False  # the first write looks at what others have left
        self._uncounted = 0  # bytes written here since the last look of this process had begun
        self._writing = 0  # bytes of those that a look may not see yet
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
        """Keeps an image; nothing happens where it takes more than an 80th of the cache, or the disk is full."""
        n_bytes = len(data) + _HEADER.size
        if n_bytes * 80 > self._max_bytes:
            return
        path = self._path(url, key, version)
        new = path.with_name(_UNFINISHED + secrets.token_hex(8))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._room(n_bytes) as is_free:
                if is_free:
                    new.write_bytes(_header(data) + data)
                    publish(new, path)
        except OSError as error:
            tell, self._tell = self._tell, None
            if tell is not None:
                tell(f"images can't be kept in {self._folder}, see params.cache.dir: {error}")
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)

    def _path(self, url: str, key: str, version: str) -> Path:
        name = sha256(f"{url}\0{key}\0{version}".encode()).hexdigest()
        return self._folder / name[:2] / name

    @contextlib.contextmanager
    def _room(self, n_bytes: int) -> Iterator[bool]:
        """Whether that much may be written now, which counts as written from the beginning."""
        with self._lock:
            self._uncounted += n_bytes
            self._writing += n_bytes
            share = self._share()
            is_free, is_time = self._uncounted <= share, not self._has_looked or self._uncounted * 2 > share
        try:
            is_free = (is_time and self._look()) or is_free
            yield is_free
        finally:
            with self._lock:
                self._writing -= n_bytes
                self._uncounted -= 0 if is_free else n_bytes

    def _share(self) -> float:
        """Bytes that a process may write before it has to look."""
        try:
            with self._lock_path.open("rb", buffering=0) as file:
                (total,) = _LOOK.unpack(file.read(_LOOK.size))
        except (OSError, struct.error):
            total = 0
        return max(self._max_bytes - int(total), self._max_bytes * (1 - _FULL)) / _WRITERS

    def _look(self) -> bool:
        """Counts the entries and drops those that are too many; whether no other process was about it."""
        file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(file):
                return False
            with self._lock:
                self._uncounted = self._writing
            os.pwrite(file, _LOOK.pack(self._shrink()), 0)  # in place: nobody reads half of it
            self._has_looked = True
        finally:
            os.close(file)
        return True

    @property
    def _lock_path(self) -> Path:
        return self._folder / ".lock"

    def _shrink(self) -> int:
        """Bytes of the entries that are left."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total <= self._max_bytes * _FULL:
            return total
        for _, size, path in entries:
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= size
            if total <= self._max_bytes * _KEPT:
                break
        return total

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
