"""Atomic writes, appends, file locks, temporary folders and SHA-256.

All other modules use these instead of os.replace, flock and hashlib.sha256.

The functions raise OSError. `results/secure_files.py` adds the ownership checks that run directories need.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from hashlib import _Hash

# No symbolic link is followed, no FIFO is waited for, and no terminal becomes the controlling one.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE = os.O_RDWR | os.O_CREAT
APPEND = CREATE | os.O_APPEND
_LOCK = ".lock"
_LARGEST_BYTES = 64 << 20


# --- Opening regular files ---


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return a descriptor of a regular file. Raises OSError for a symbolic link (ELOOP) and any other kind (EINVAL)."""
    descriptor = os.open(path, flags | _SAFE, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file that another user may have written.

    Raises OSError, also for a symbolic link (ELOOP), a FIFO (EINVAL), and a file above 64 MiB (EFBIG).
    """
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def open_append(path: Path, *, create_mode: int | None = None) -> int:
    """Return a descriptor whose writes go to the end of the file; `create_mode` creates a file that is missing."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags) if create_mode is None else os.open(path, flags | os.O_CREAT, create_mode)


def text_or_empty(path: Path) -> str:
    """Return the text of a small file, for example in /proc or /sys; "" if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def state_of_new_file(folder: Path) -> os.stat_result | None:
    """Create a file, delete it, and return the state that it had; None where this user cannot create one.

    The file system may set its owner and its times: a server has a clock of its own.
    """
    probe = folder / f".probe.{secrets.token_hex(4)}.tmp"
    try:
        descriptor = open_regular(probe, CREATE | os.O_EXCL)
    except OSError:
        return None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            probe.unlink()


def time_in(folder: Path) -> float:
    """Return the time of a folder's file system in seconds since 1970, with which to compare the times of its files.

    It is the time of this host where this user cannot create a file.
    """
    state = state_of_new_file(folder)
    return time.time() if state is None else state.st_mtime


def entries(folder: Path) -> list[Path]:
    """Return the content of a folder; [] if it is not a folder or can't be read (Path.glob would raise)."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def is_utf8(name: str) -> bool:
    """Return whether the name of a file can be encoded: names of local files may be arbitrary bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def why_not_private(folder: Path, status: os.stat_result) -> str:
    """Return why other users may have access to a folder, or that it is a symbolic link; "" if it is private.

    status: of the open folder, or lstat() of its path.
    """
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not mode & 0o077:
        return ""
    return (
        f"{folder} is a folder of user {status.st_uid} with mode {mode:04o}, but it must belong to user "
        f"{os.geteuid()} with mode 0700: remove it"
    )


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, each with mode 0700; Path.mkdir leaves the parents to the umask.

    Raises OSError. An existing folder is not changed.
    """
    missing = takewhile(lambda path: not path.is_dir(), [folder, *folder.parents])
    for path in reversed(list(missing)):
        path.mkdir(mode=0o700, exist_ok=True)


# --- Writing ---


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of the data; one call of os.write may write only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a file's content. Readers see the old or the new content, also after a crash if `durable`."""
    with atomic_file(path, mode=mode, durable=durable) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` when the block ends, and is deleted if the block raises.

    The temporary file is in the same folder; its name begins with a dot and ends with .tmp. Raises OSError (EINVAL) if
    `path` is a device, a FIFO or a socket, or a link to one: root would replace /dev/null.
    """
    if _is_special(path):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _is_special(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def publish(source: Path | str, target: Path | str) -> None:
    """Give a finished file or folder its final name in one step; a file of that name is replaced."""
    os.replace(source, target)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Locks (flock): they are released when the descriptor is closed, also by the end of the process ---


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file; return False if another process holds it.

    Raises OSError if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, *, shared: bool = False) -> None:
    """Take the lock of an open file; wait as long as other processes hold it."""
    fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` is still the open file or folder: it may have been deleted during the wait for its lock."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# --- Temporary folders that do not outlive a killed process ---


@contextmanager
def temp_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder of make_temp_folder(), and delete it afterwards. Raises OSError."""
    folder, lock = make_temp_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def make_temp_folder(prefix: str, parent: str | Path = "") -> tuple[Path, int]:
    """Make a private folder in `parent` (default: the temporary folder), and delete those of killed processes there.

    Also return the descriptor of the lock that shows that the folder is in use: the end of this process releases it.
    Raises OSError.
    """
    parent = Path(parent or tempfile.gettempdir())
    for old in parent.glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError):  # it belongs to another user, or its file system has no locks
            _remove_abandoned(old)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = open_regular(folder / _LOCK, CREATE)
        with suppress(OSError):  # without locks the folder is never considered abandoned
            wait_for_lock(lock)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another process took the lock first, and deleted the folder


def _remove_abandoned(lock_path: Path) -> None:
    folder = lock_path.parent
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return
    lock = open_regular(lock_path, os.O_RDWR)
    try:
        if try_lock(lock):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


# --- SHA-256 ---


def sha256(data: bytes | memoryview = b"") -> _Hash:
    """Return a SHA-256 object, for data that arrives in pieces or needs only a part of the digest."""
    return hashlib.sha256(data)


def hash_file(path: Path | str, *, safely: bool = False) -> tuple[int, str]:
    """Return the size of a file in bytes and its SHA-256 in hex; `safely`: only of what open_regular() opens."""
    with open(path, "rb", buffering=0, opener=(lambda name, _: open_regular(name)) if safely else None) as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()
