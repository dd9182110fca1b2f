"""Moves files that ranks have staged into the run directory, after a check of their sizes and hashes.

Files on the same file system are linked, others are copied. The staged files stay, so that a failed move can be
repeated.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddptrain.file_ops import open_regular, publish, sha256, sync_folder
from ddptrain.protocol.events import FileSaved
from ddptrain.results.errors import FileDamaged, ResultsError, results_errors
from ddptrain.results.layout import INCOMING, safe_relative

_CHUNK_BYTES = 1 << 20
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
_NOT_A_FILE = {errno.ELOOP: "it is a symbolic link", errno.EINVAL: "it is not a plain file"}


@dataclass(frozen=True, slots=True)
class StagedMove:
    """A staged file, its target, and the size and hash that its event states."""

    source: Path
    target: Path
    size_bytes: int
    sha256: str


def _nothing() -> None:
    pass


def adopt_file(area: Path, event: FileSaved, source: Path, moved: Callable[[], None] = _nothing) -> Path:
    """Move a staged file to `area`/`event.path`, where it replaces a file of that name; return its path.

    `moved` is called after each part of the file; an exception of it ends the move.

    Raises UnsafePath, FileDamaged, ResultsError.
    """
    relative = safe_relative(event.path)
    final = area / relative
    folder = final.parent
    with results_errors(folder):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    incoming = folder / f"{INCOMING}{secrets.token_hex(8)}"
    try:
        move_in([StagedMove(source, incoming, event.size_bytes, event.sha256)], FileDamaged, moved)
        with results_errors(final):
            publish(incoming, final)
            sync_folder(folder)
    except BaseException:
        incoming.unlink(missing_ok=True)
        raise
    source.unlink(missing_ok=True)
    return final


def move_in(moves: Sequence[StagedMove], damaged: type[ResultsError], moved: Callable[[], None] = _nothing) -> None:
    """Link or copy every file to its target, durably. The caller deletes the staged files.

    Raises `damaged` if a staged file does not match its event, and then targets may exist; ResultsError if a target
    can't be written.
    """
    for move in moves:
        digest, size = sha256(), 0
        try:
            file = os.fdopen(open_regular(move.source), "rb")
        except OSError as error:
            cause = _NOT_A_FILE.get(error.errno or 0, error.strerror)
            raise damaged(f"cannot read the staged file {move.source}: {cause}") from error
        with results_errors(move.target), file, nullcontext() if _link(move) else _new(move.target) as copy:
            while size <= move.size_bytes:
                try:
                    chunk = file.read(_CHUNK_BYTES)
                except OSError as error:
                    raise damaged(f"cannot read {move.source}: {error.strerror or error}") from error
                if not chunk:
                    break
                digest.update(chunk)
                size += len(chunk)
                if copy is not None:
                    copy.write(chunk)
                moved()
            if size != move.size_bytes:
                actual = f"over {move.size_bytes}" if size > move.size_bytes else str(size)
                raise damaged(f"{move.source} is damaged: it has {actual} bytes, not the {move.size_bytes} announced")
            if digest.hexdigest() != move.sha256.lower():
                raise damaged(f"{move.source} is damaged: its SHA-256 is not the one announced")
            if copy is not None:
                copy.flush()
            else:
                with suppress(OSError):  # NFS may have given it to another user
                    os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~0o022)
            os.fsync((copy or file).fileno())


def _link(move: StagedMove) -> bool:
    """Create a hard link to the file. Returns False if the file systems or the kernel do not allow it."""
    try:
        os.link(move.source, move.target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def _new(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb")  # not writable for others
