"""Files that are either whole or not there, and lines that are either whole or not appended."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ddptrain.results.errors import naming
from ddptrain.results.record import plain


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file's content at once: a reader, or a crash, sees the old or the new, never half. Raises
    ResultsError.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with naming(path):
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonLines:
    """Appends JSON objects to a file, each at once; the file has one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with naming(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(self._descriptor).st_size

    def append(self, record: Mapping[str, object]) -> None:
        """Append one line, or on a full disk nothing of it. Raises ResultsError."""
        data = (json.dumps(plain(record), allow_nan=False, separators=(",", ":")) + "\n").encode()
        with naming(self._path):
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
