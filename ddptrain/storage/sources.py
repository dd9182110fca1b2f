"""Opens places that are read: folders of this machine, object stores, and what else fsspec knows."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.storage.store import (
    OBJECT_STORES,
    Limits,
    Listed,
    Location,
    NotFound,
    Source,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
)

DEFAULTS = Limits()
_CHUNK_BYTES = 1 << 20


def open_source(location: Location, limits: Limits = DEFAULTS) -> Source:
    """Open a location in this process; no request is sent yet. Raises UsageError for unknown options; StoreError."""
    # The backends are imported here: obstore and fsspec start threads, which a process must not have if it forks.
    if location.protocol == "file":
        return LocalFolder(location)
    if location.protocol in OBJECT_STORES:
        from ddptrain.storage.object_store import open_object_store

        return open_object_store(location, limits)
    from ddptrain.storage.fsspec_store import open_fsspec_store

    return open_fsspec_store(location, limits)


def fetch(where: str, options: Mapping[str, Any], setting: str, limit_bytes: int) -> bytes:
    """Return the content of one small file, given by its path or URL. Raises UsageError, StoreError.

    A file larger than `limit_bytes`, or without end, is cut off after more than `limit_bytes`.
    """
    content = bytearray()
    for chunk in fetch_chunks(where, options, setting=setting, limits=Limits(timeout_s=60.0, retries=2)):
        content += chunk
        if len(content) > limit_bytes:
            break
    return bytes(content)


def fetch_chunks(where: str, options: Mapping[str, Any], *, setting: str, limits: Limits) -> Iterator[bytes]:
    """Yield the content of one file in pieces, given by its path or URL. Raises UsageError, StoreError."""
    location = Location.of(where, options, setting)
    key = ""
    if location.protocol == "file" or location.protocol in OBJECT_STORES:
        folder, _, key = location.url.rpartition("/")
        location = Location(folder, location.options, setting)
    try:
        yield from open_source(location, limits).chunks(key)
    except (NotFound, StoreMissing) as error:
        if isinstance(error, StoreMissing) and location.protocol != "file":
            raise
        raise StoreMissing(f"{Location.of(where, {}).description} does not exist") from None


class LocalFolder(Source):
    """A folder of this machine. Symbolic links are followed; a folder is entered once."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.folder = Path(location.url)

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """See Source."""
        if not self.folder.is_dir():
            what = "is not a folder" if self.folder.exists() else "does not exist"
            want = f"{self.location.setting} must be a folder with one folder of images for each class"
            raise StoreMissing(f"{self.folder} {what}: {want}")

        def refuse(error: OSError) -> None:
            kind = StoreForbidden if isinstance(error, PermissionError) else StoreUnreachable
            raise kind(f"{self.folder} can't be read: {error}") from error

        root, entered = str(self.folder), set()
        for place, folders, names in os.walk(str(self.folder / folder), onerror=refuse, followlinks=True):
            state = os.stat(place)
            if (state.st_dev, state.st_ino) in entered:  # links may lead in a circle
                folders.clear()
                continue
            entered.add((state.st_dev, state.st_ino))
            folders.sort()
            prefix = "" if place == root else f"{place[len(root) + 1 :]}/"
            for name in sorted(names):
                with suppress(FileNotFoundError):  # a link to nothing
                    about = os.stat(f"{place}/{name}")
                    if stat.S_ISREG(about.st_mode):
                        version = f"{about.st_mtime_ns:x}-{about.st_ino:x}"
                        yield Listed(prefix + name, about.st_size, version, about.st_mtime)

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """See Source."""
        try:
            with self._open(key) as file:
                file.seek(start)
                data = file.read(-1 if limit_bytes is None else limit_bytes + 1)
        except OSError as error:
            raise self._read_error(key, error) from None
        return self._limited(key, data, limit_bytes)

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Source."""
        try:
            with self._open(key) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise self._read_error(key, error) from None

    def _open(self, key: str) -> BinaryIO:
        return (self.folder / key).open("rb")

    def _read_error(self, key: str, error: OSError) -> StoreError:
        """Return the error for a file that can't be read: it alone may be missing, or the whole folder."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            kind = StoreForbidden if isinstance(error, PermissionError) else Transient
            return kind(f"{self.folder / key} can't be read: {error}")
        here = f"on {socket.gethostname()}"
        if not os.path.isdir(self.folder):
            return StoreMissing(f"the folder {self.folder} does not exist {here}: every rank must be able to read it")
        with suppress(OSError):
            if not os.listdir(self.folder):  # an empty mount point
                return StoreMissing(f"the folder {self.folder} is empty {here}: is its file system mounted?")
        return NotFound(key)
