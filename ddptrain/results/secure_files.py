"""Opens, appends to and replaces files of run directories.

Whether a run directory belongs to this user is checked when it is claimed. After that, no function here follows a
symbolic link. Files are either complete or absent, and lines are either complete or not appended.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ddptrain import file_ops
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.run_record import ascii_json

# --- Files ---


read_bytes = file_ops.read_regular


def write_file(path: Path, data: bytes) -> None:
    """Replace a file's content in one step; readers and crashes leave the old or the new one. Raises ResultsError."""
    with results_errors(path):
        file_ops.write_atomic(path, data)


def open_to_append(path: Path) -> int:
    """Return a descriptor for reading and appending; a missing file is created. Raises ResultsError."""
    with results_errors(path):
        return file_ops.open_regular(path, file_ops.APPEND, 0o644)


def append(path: Path, data: bytes) -> None:
    """Append to a file; a missing one is created. Raises ResultsError."""
    descriptor = open_to_append(path)
    try:
        with results_errors(path):
            file_ops.write_all(descriptor, data)
    finally:
        os.close(descriptor)


# --- Folders ---


def is_own_folder(path: Path) -> bool:
    """Return whether the path is a folder of this user."""
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
    import pwd

    try:
        state = path.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(state.st_mode):
        return "it is not a folder"
    if state.st_uid == os.geteuid():
        return ""
    # NFS with root_squash, and FAT, change the owner of every file.
    new = file_ops.state_of_new_file(path)
    if new is not None and new.st_uid == state.st_uid:
        return ""
    try:
        user = pwd.getpwuid(state.st_uid).pw_name
    except KeyError:
        user = f"user id {state.st_uid}"
    return f"the folder belongs to another user ({user})"


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
