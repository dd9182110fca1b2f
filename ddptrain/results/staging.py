"""Brings staged files home: linked on one file system, copied between two, and only if they are what was
announced. The staged ones stay, so that one that finds no room can be brought again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddptrain.results.errors import ResultsError, naming

_CHUNK_BYTES = 1 << 20
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


@dataclass(frozen=True, slots=True)
class Parcel:
    """A staged file, where it goes, and what its event says of it."""

    source: Path
    target: Path
    size_bytes: int
    sha256: str


def bring_home(parcels: Sequence[Parcel], damaged: type[ResultsError]) -> None:
    """Put every file in its place, on the disk for good; the staged ones are for the caller to remove.

    Raises:
        ResultsError: a target can't be written; as `damaged`, a staged file is not what was announced.
    """
    if _on_one_file_system(parcels):
        for parcel in parcels:
            _receive(parcel, damaged, None)
        if _linked(parcels):
            return
    for parcel in parcels:
        with naming(parcel.target), parcel.target.open("xb") as out:
            _receive(parcel, damaged, out)
            out.flush()
            os.fsync(out.fileno())


def _on_one_file_system(parcels: Sequence[Parcel]) -> bool:
    try:
        return all(os.lstat(p.source).st_dev == p.target.parent.stat().st_dev for p in parcels)
    except OSError:
        return False


def _linked(parcels: Sequence[Parcel]) -> bool:
    """Give the files a second name; False where the file system, or the kernel, has none to give."""
    for parcel in parcels:
        with naming(parcel.target):
            try:
                os.link(parcel.source, parcel.target, follow_symlinks=False)
            except OSError as error:
                if error.errno in _NO_LINKS and parcel is parcels[0]:
                    return False
                raise
    return True


def _receive(parcel: Parcel, damaged: type[ResultsError], out: BinaryIO | None) -> None:
    """Check the staged file; write it to `out`, or without one make the staged file itself durable."""
    digest = hashlib.sha256()
    size = 0
    with _opened(parcel.source, damaged) as file:
        while chunk := _chunk(file, parcel.source, damaged):
            digest.update(chunk)
            size += len(chunk)
            if size > parcel.size_bytes:
                break
            if out is not None:
                out.write(chunk)
        if size != parcel.size_bytes:
            found = f"over {parcel.size_bytes}" if size > parcel.size_bytes else str(size)
            raise damaged(f"{parcel.source} is damaged: it has {found} bytes, not the {parcel.size_bytes} announced")
        if digest.hexdigest() != parcel.sha256.lower():
            raise damaged(f"{parcel.source} is damaged: its SHA-256 is not the one announced")
        if out is None:
            with naming(parcel.source):
                os.fsync(file.fileno())


def _chunk(file: BinaryIO, path: Path, damaged: type[ResultsError]) -> bytes:
    try:
        return file.read(_CHUNK_BYTES)
    except OSError as error:
        raise damaged(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def _opened(path: Path, damaged: type[ResultsError]) -> Iterator[BinaryIO]:
    """The file, if it is a plain one: a link could lead anywhere, a pipe would keep the driver waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        cause = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise damaged(f"cannot read the staged file {path}: {cause}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise damaged(f"the staged file {path} is not a plain file")
        yield file
