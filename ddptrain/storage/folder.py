"""A folder of this machine as a store of images. Symbolic links are followed; a folder is entered once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
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
        try:
            yield from self._below(self._root / folder, f"{folder}/" if folder else "", set())
        except PermissionError as error:
            raise StoreForbidden(f"{self._root} can't be read: {error}") from error
        except OSError as error:
            raise StoreUnreachable(f"{self._root} can't be read: {error}") from error

    def _below(self, folder: Path, prefix: str, entered: set[tuple[int, int]]) -> Iterator[Listed]:
        state = folder.stat()
        identity = (state.st_dev, state.st_ino)
        if identity in entered:  # links may lead in a circle
            return
        entered.add(identity)
        with os.scandir(folder) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
        for entry in children:
            key = f"{prefix}{entry.name}"
            if entry.is_dir():
                yield from self._below(folder / entry.name, f"{key}/", entered)
            elif entry.is_file():
                about = entry.stat()
                yield Listed(key, about.st_size, f"{about.st_mtime_ns:x}-{about.st_ino:x}")

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
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            return self._missing(key)
        kind = StoreForbidden if isinstance(error, PermissionError) else Transient
        return kind(f"{self._root / key} can't be read: {error}")

    def _missing(self, key: str) -> StoreError:
        """Return the error for a missing file: the file alone may be missing, or the whole folder."""
        here = f"on {socket.gethostname()}"
        try:
            if not self._root.is_dir():
                return StoreMissing(
                    f"the folder {self._root} does not exist {here}: every rank must be able to read it"
                )
            with os.scandir(self._root) as entries:
                if next(entries, None) is None:  # an empty mount point
                    return StoreMissing(f"the folder {self._root} is empty {here}: is its file system mounted?")
        except PermissionError:
            pass
        except OSError as error:
            return Transient(f"{self._root} can't be read: {error}")
        return NotFound(key)
