"""The folder in which the workers of one host find their shared rank server.

The first worker creates the listening socket, connects to it, and then starts the server, so that no worker waits for
the server to start. The server removes the folder after its last connection. Both hold the lock of the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from ddptrain.errors import ClusterError
from ddptrain.file_ops import is_at, wait_for_lock, why_not_private

LOG_FILE = "log"  # the output of the server
_SOCKET = "socket"
_BACKLOG = 1024  # workers that may connect while the server imports
_MAX_ADDRESS_BYTES = 100  # the kernel's sockaddr_un holds 107


class SocketFolder:
    """The folder at `path` while its lock is held; `fd` is its descriptor."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def connect(self) -> socket.socket | None:
        """Connect to the server of this folder; None if there is none."""
        connection = _new_socket()
        try:
            connection.connect(self._address())
        except BaseException as error:
            connection.close()
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                return None
            raise
        return connection

    def listen(self) -> socket.socket:
        """Create the listening socket; replace the socket of a server that died."""
        (self.path / _SOCKET).unlink(missing_ok=True)
        listener = _new_socket()
        try:
            listener.bind(self._address())
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def remove(self) -> None:
        """Delete the folder; a process that waits for its lock creates a new one."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _address(self) -> str:
        path = str(self.path / _SOCKET)
        if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
            return path
        return f"/proc/self/fd/{self._fd}/{_SOCKET}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[SocketFolder]:
    """Hold the lock of a folder, which is created if it is missing.

    Raises ClusterError if other users can access it.
    """
    fd = _lock(path)
    try:
        yield SocketFolder(path, fd)
    finally:
        os.close(fd)


def _lock(path: Path) -> int:
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # the server has just removed it
        except OSError as error:
            raise ClusterError(f"{path} is not a usable folder: {error.strerror}; remove it") from error
        try:
            if problem := why_not_private(path, os.fstat(fd)):
                raise ClusterError(problem)
            wait_for_lock(fd)
            if is_at(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
