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
from contextlib import suppress
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

    Raises `damaged` if a staged file does not match its event; ResultsError if a target can't be written.
    """
    if _on_one_file_system(moves):
        for move in moves:
            _check_and_copy(move, damaged, None, moved)
        if _link_all(moves):
            return
    for move in moves:
        with results_errors(move.target), open(move.target, "xb", opener=_for_us) as out:
            _check_and_copy(move, damaged, out, moved)
            out.flush()
            os.fsync(out.fileno())


def _for_us(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)  # never writable for other users


def _on_one_file_system(moves: Sequence[StagedMove]) -> bool:
    try:
        return all(os.lstat(p.source).st_dev == p.target.parent.stat().st_dev for p in moves)
    except OSError:
        return False


def _link_all(moves: Sequence[StagedMove]) -> bool:
    """Create hard links to the files. Returns False if the file system or the kernel does not allow it."""
    for move in moves:
        with results_errors(move.target):
            try:
                os.link(move.source, move.target, follow_symlinks=False)
            except OSError as error:
                if error.errno in _NO_LINKS and move is moves[0]:
                    return False
                raise
    return True


def _check_and_copy(
    move: StagedMove, damaged: type[ResultsError], out: BinaryIO | None, moved: Callable[[], None]
) -> None:
    """Check size and hash of the staged file; copy it to `out`, or fsync the staged file if `out` is None."""
    digest, size = sha256(), 0
    try:
        file = os.fdopen(open_regular(move.source), "rb")
    except OSError as error:
        cause = _NOT_A_FILE.get(error.errno or 0, error.strerror)
        raise damaged(f"cannot read the staged file {move.source}: {cause}") from error
    with file:
        while size <= move.size_bytes:
            try:
                chunk = file.read(_CHUNK_BYTES)
            except OSError as error:
                raise damaged(f"cannot read {move.source}: {error.strerror or error}") from error
            if not chunk:
                break
            digest.update(chunk)
            size += len(chunk)
            if out is not None:
                out.write(chunk)
            moved()
        if size != move.size_bytes:
            actual = f"over {move.size_bytes}" if size > move.size_bytes else str(size)
            raise damaged(f"{move.source} is damaged: it has {actual} bytes, not the {move.size_bytes} announced")
        if digest.hexdigest() != move.sha256.lower():
            raise damaged(f"{move.source} is damaged: its SHA-256 is not the one announced")
        if out is None:
            with suppress(OSError):  # NFS may have given it to another user
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~0o022)
            with results_errors(move.source):
                os.fsync(file.fileno())
