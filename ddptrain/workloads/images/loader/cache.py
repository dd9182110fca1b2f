"""A cache of images on the local disk, shared by ranks and runs, with a maximal size."""

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

_HEADER = struct.Struct("<QI")  # size of the content, and its CRC-32
_UNFINISHED = ".new-"
_UNFINISHED_S = 3600.0  # older unfinished files belong to processes that were killed
_SIZE = struct.Struct("<Q")  # content of the lock file: total size of all entries after the last clean-up
_FULL, _KEPT = 0.875, 0.85  # shares of the limit: a clean-up starts above the first, and ends at the second
_WRITERS = 10  # the free space is divided by so many processes


class Cache:
    """A folder of images; the least recently used ones are deleted first.

    Any number of processes can use it. Entries appear by renaming. One process at a time cleans up, under a file lock.
    A process may write a tenth of the space that was free after the last clean-up, and must clean up itself before it
    writes more; if another process is cleaning up, the image is not cached. So nine concurrent writers stay below
    `max_bytes`, and no process waits. File system errors are never raised: unreadable entries are missing, failed
    writes are skipped, and `tell` gets the reason of the first one.
    """

    def __init__(self, folder: Path, max_bytes: int, tell: Callable[[str], None] | None = None) -> None:
        self._folder = folder
        self._tell = tell
        self._max_bytes = max_bytes
        self._has_cleaned = False  # the first write cleans up what other processes left
        self._uncounted = 0  # bytes written by this process since its last clean-up began
        self._writing = 0  # bytes of writes in progress, which a clean-up may not see yet
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[Path, int]]:
        return Cache, (self._folder, self._max_bytes)

    def get(self, url: str, key: str, version: str) -> bytes | None:
        """Return the content of an image, if it is cached; a damaged entry is deleted."""
        path = self._path(url, key, version)
        try:
            with path.open("rb", buffering=0) as file:
                content = file.read()
                with contextlib.suppress(OSError):  # of another user, or on a read-only disk
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
        """Cache an image, unless it is larger than 1/80 of the cache or the disk is full."""
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
                tell(f"images can't be cached in {self._folder}, see params.cache.dir: {error}")
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)

    def _path(self, url: str, key: str, version: str) -> Path:
        name = sha256(f"{url}\0{key}\0{version}".encode()).hexdigest()
        return self._folder / name[:2] / name

    @contextlib.contextmanager
    def _room(self, n_bytes: int) -> Iterator[bool]:
        """Whether `n_bytes` may be written now; they are counted from the start of the write."""
        with self._lock:
            self._uncounted += n_bytes
            self._writing += n_bytes
            share = self._share()
            is_free, is_due = self._uncounted <= share, not self._has_cleaned or self._uncounted * 2 > share
        try:
            is_free = (is_due and self._clean_up()) or is_free
            yield is_free
        finally:
            with self._lock:
                self._writing -= n_bytes
                self._uncounted -= 0 if is_free else n_bytes

    def _share(self) -> float:
        """Return bytes that a process may write before it must clean up."""
        try:
            with self._lock_path.open("rb", buffering=0) as file:
                (total,) = _SIZE.unpack(file.read(_SIZE.size))
        except (OSError, struct.error):
            total = 0
        return max(self._max_bytes - int(total), self._max_bytes * (1 - _FULL)) / _WRITERS

    def _clean_up(self) -> bool:
        """Delete entries above the limit and store the total size; false if another process is cleaning up."""
        file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(file):
                return False
            with self._lock:
                self._uncounted = self._writing
            os.pwrite(file, _SIZE.pack(self._shrink()), 0)  # in place: readers never see half of it
            self._has_cleaned = True
        finally:
            os.close(file)
        return True

    @property
    def _lock_path(self) -> Path:
        return self._folder / ".lock"

    def _shrink(self) -> int:
        """Delete entries above the limit; return the bytes of the remaining ones."""
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
        """(last use, size, path) of each entry; old unfinished files are deleted."""
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
