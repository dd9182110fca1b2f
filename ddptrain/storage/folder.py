"""A folder of this machine as a store of images. Symbolic links are followed; a folder is entered once."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddptrain.storage.store import (
    Listed,
    Location,
    NotFound,
    Store,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
)

_CHUNK_BYTES = 1 << 20


class Folder(Store):
    """A folder of this machine, for reading. Runs in a folder are written by results/run_writer.py."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._root = Path(location.url)

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """See Store."""
        if not self._root.is_dir():
            what = "is not a folder" if self._root.exists() else "does not exist"
            want = f"{self.location.setting} must be a folder with one folder of images for each class"
            raise StoreMissing(f"{self._root} {what}: {want}")

        def refuse(error: OSError) -> None:
            kind = StoreForbidden if isinstance(error, PermissionError) else StoreUnreachable
            raise kind(f"{self._root} can't be read: {error}") from error

        root, entered = str(self._root), set()
        for place, folders, names in os.walk(str(self._root / folder), onerror=refuse, followlinks=True):
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
        """See Store."""
        try:
            with (self._root / key).open("rb") as file:
                file.seek(start)
                data = file.read(-1 if limit_bytes is None else limit_bytes + 1)
        except OSError as error:
            raise self._get_error(key, error) from None
        return self._limited(key, data, limit_bytes)

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Store."""
        try:
            with (self._root / key).open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise self._get_error(key, error) from None

    def _get_error(self, key: str, error: OSError) -> StoreError:
        """Return the error for a file that can't be read: it alone may be missing, or the whole folder."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            kind = StoreForbidden if isinstance(error, PermissionError) else Transient
            return kind(f"{self._root / key} can't be read: {error}")
        here = f"on {socket.gethostname()}"
        try:
            if not self._root.is_dir():
                return StoreMissing(
                    f"the folder {self._root} does not exist {here}: every rank must be able to read it"
                )
            if not any(self._root.iterdir()):  # an empty mount point
                return StoreMissing(f"the folder {self._root} is empty {here}: is its file system mounted?")
        except PermissionError:
            pass
        except OSError as failed:
            return Transient(f"{self._root} can't be read: {failed}")
        return NotFound(key)
