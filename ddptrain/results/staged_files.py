"""Moves files that ranks have staged into the run directory, after a check of their sizes and hashes.

Files on the same file system are linked, others are copied. The staged files stay, so that a failed move can be
repeated.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddptrain.file_ops import open_regular, publish, sha256, sync_folder
from ddptrain.protocol.events import FileSaved
from ddptrain.results.errors import FileDamaged, ResultsError, UnsafePath, naming
from ddptrain.results.layout import INCOMING, safe_relative

_CHUNK_BYTES = 1 << 20
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
_NOT_A_FILE = {errno.ELOOP: "it is a symbolic link", errno.EINVAL: "it is not a plain file"}


@dataclass(frozen=True, slots=True)
class Parcel:
    """A staged file, its target, and the size and hash that its event states."""

    source: Path
    target: Path
    size_bytes: int
    sha256: str


def adopt_file(area: Path, event: FileSaved, source: Path) -> Path:
    """Move a staged file to `area`/`event.path`, where it replaces a file of that name; return its path.

    Raises UnsafePath, FileDamaged, ResultsError.
    """
    relative = safe_relative(event.path)
    folder = _folder(area, relative.parent.parts)
    final = folder / relative.name
    if final.is_dir() and not final.is_symlink():
        raise UnsafePath(f'cannot save a file as "{event.path}": {area.name}/{relative} is a folder')
    incoming = folder / f"{INCOMING}{secrets.token_hex(8)}"
    try:
        move_in([Parcel(source, incoming, event.size_bytes, event.sha256)], FileDamaged)
        with naming(final):
            publish(incoming, final)
            sync_folder(folder)
    except BaseException:
        incoming.unlink(missing_ok=True)
        raise
    source.unlink(missing_ok=True)
    return final


def _folder(area: Path, parts: tuple[str, ...]) -> Path:
    """Return the folder below `area`, created if missing; each folder on the way must be a folder, not a link."""
    folder = area
    for part in ("", *parts):
        folder = folder / part
        with naming(folder):
            if not os.path.lexists(folder):
                folder.mkdir()
            kind = folder.lstat().st_mode
        if not stat.S_ISDIR(kind):
            what = "a symbolic link" if stat.S_ISLNK(kind) else "a file"
            raise UnsafePath(f"cannot save a file below {folder}: that is {what}, not a folder; choose another path")
    return folder


def move_in(parcels: Sequence[Parcel], damaged: type[ResultsError]) -> None:
    """Link or copy every file to its target, durably. The caller deletes the staged files.

    Raises `damaged` if a staged file does not match its event; ResultsError if a target can't be written.
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
    """Create hard links to the files. Returns False if the file system or the kernel does not allow it."""
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
    """Check the staged file; copy it to `out`, or without one make the staged file itself durable."""
    digest, size = sha256(), 0
    with os.fdopen(_opened(parcel.source, damaged), "rb") as file:
        while size <= parcel.size_bytes and (chunk := _chunk(file, parcel.source, damaged)):
            digest.update(chunk)
            size += len(chunk)
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


def _opened(path: Path, damaged: type[ResultsError]) -> int:
    try:
        return open_regular(path)
    except OSError as error:
        cause = _NOT_A_FILE.get(error.errno or 0, error.strerror)
        raise damaged(f"cannot read the staged file {path}: {cause}") from error
