"""Opens, appends to and replaces files of run directories.

A run directory may be in a folder that other users write to. So no function here follows a symbolic link to a file,
waits for the other end of a FIFO, or writes to a file or folder of another user. Files are either complete or absent,
and lines are either complete or not appended.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain import file_ops
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.run_record import ascii_json

_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


# --- Files ---


read_bytes = file_ops.read_regular


def write_file(path: Path, data: bytes) -> None:
    """Replace a file's content in one step; readers and crashes leave the old or the new one. Raises ResultsError."""
    with results_errors(path):
        file_ops.write_atomic(path, data)


def open_to_append(path: Path) -> int:
    """Return a descriptor for reading and appending; a missing file is created. Raises ResultsError."""
    return _open_own(path, file_ops.APPEND, 0o644)


def open_to_lock(path: Path) -> int:
    """Return a descriptor of a lock file that other users cannot open, so that they cannot hold its lock.

    Raises ResultsError.
    """
    descriptor = _open_own(path, file_ops.CREATE, 0o600)
    with suppress(OSError):  # a file system without modes
        if os.fstat(descriptor).st_mode & 0o077:  # as older versions created it
            os.fchmod(descriptor, 0o600)
    return descriptor


def append(path: Path, data: bytes) -> None:
    """Append to a file; a missing one is created. Raises ResultsError."""
    descriptor = open_to_append(path)
    try:
        with results_errors(path):
            file_ops.write_all(descriptor, data)
    finally:
        os.close(descriptor)


def _open_own(path: Path, flags: int, mode: int) -> int:
    with results_errors(path):
        try:
            descriptor = file_ops.open_regular(path, flags, mode)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO):
                what = "a symbolic link" if error.errno == errno.ELOOP else "not a regular file"
                raise ResultsError(
                    f"cannot write {path}: it is {what}, which ddptrain never creates; remove it"
                ) from error
            raise
    try:
        with results_errors(path):
            problem = _problem(os.fstat(descriptor), path.parent)
        if problem:
            raise ResultsError(f"cannot write {path}: {problem}; remove it, or choose another folder with --runs-dir")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _problem(state: os.stat_result, folder: Path) -> str:
    """Return why an open file must not be written to, or "" if it may be."""
    if not _is_our_id(state.st_uid, folder):
        return f"it belongs to another user ({_user(state.st_uid)})"
    # Another user who may write to the folder may have given this name to a file of ours.
    if state.st_nlink > 1 and folder.stat().st_mode & _WRITTEN_BY_OTHERS:
        return f"it has {state.st_nlink} names (hard links), in a folder that others may write to"
    return ""


# --- Folders ---


def is_own_folder(path: Path) -> bool:
    """Return whether the path is a folder of this user; a symbolic link to it must belong to this user as well."""
    return not _folder_problem(path)


def require_own_folder(path: Path) -> None:
    """Check that the path is a folder of this user. Raises ResultsError otherwise."""
    if problem := _folder_problem(path):
        raise ResultsError(f"cannot write into {path}: {problem}; ddptrain writes only into folders of your own")


def make_folder(path: Path) -> None:
    """Create a folder that only this user may write to; one that exists must be this user's. Raises ResultsError."""
    with results_errors(path):
        path.mkdir(mode=0o755, exist_ok=True)
    require_own_folder(path)


def _folder_problem(path: Path) -> str:
    try:
        link, state = path.lstat(), path.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(state.st_mode):
        return "it is not a folder"
    if not _is_our_id(state.st_uid, path):
        return f"the folder belongs to another user ({_user(state.st_uid)})"
    if not _is_our_id(link.st_uid, path.parent):
        return f"the symbolic link belongs to another user ({_user(link.st_uid)})"
    return ""


def _is_our_id(uid: int, folder: Path) -> bool:
    """Return whether a file with that owner, in that folder, may be one that this user has created."""
    return uid == os.geteuid() or uid == _id_given_in(folder)


def _id_given_in(folder: Path) -> int | None:
    """Return the owner of files that this user creates there: NFS with root_squash and FAT change it."""
    state = file_ops.state_of_new_file(folder)
    return None if state is None else state.st_uid


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user id {uid}"


@dataclass(frozen=True, slots=True)
class FolderIdentity:
    """Recognizes a folder: users who may write to its parent can put another one in its place."""

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FolderIdentity:
        """Return the identity of a folder of this user. Raises ResultsError."""
        require_own_folder(path)
        with results_errors(path):
            state = path.stat()
        return cls(path, state.st_dev, state.st_ino)

    def check(self) -> None:
        """Check that the same folder is at the path. Raises ResultsError otherwise."""
        with results_errors(self.path):
            state = self.path.stat()
        if (state.st_dev, state.st_ino) != (self.device, self.inode):
            raise ResultsError(f"cannot write into {self.path}: another process has put a different folder there")


# --- Lines ---


_MOST_WAITING_BYTES = 1 << 16


class JsonLines:
    """Appends JSON objects to a file, one line each; the file has one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = bytearray()
        self._descriptor = open_to_append(path)
        with results_errors(path):
            self._size = os.fstat(self._descriptor).st_size
            # A writer that was killed leaves half a line: the next one must not continue it.
            self._is_torn = self._size > 0 and os.pread(self._descriptor, 1, self._size - 1) != b"\n"

    def append(self, record: Mapping[str, object]) -> None:
        """Append one line completely, or nothing if a write fails. Raises ResultsError."""
        self.add(record)
        self.flush()

    def add(self, record: Mapping[str, object]) -> None:
        """Append one line with the next flush(): a system call for each would be most of the cost. May flush itself."""
        self._waiting += ascii_json(record)
        self._waiting += b"\n"
        if len(self._waiting) > _MOST_WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Append the lines that wait completely, or nothing of them if a write fails. Raises ResultsError."""
        if not self._waiting:
            return
        data = (b"\n" if self._is_torn else b"") + bytes(self._waiting)
        self._waiting.clear()
        with results_errors(self._path):
            try:
                file_ops.write_all(self._descriptor, data)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(data)
        self._is_torn = False

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self._size

    def close(self) -> None:
        """Close the file without the lines that wait; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
