"""Dask communication over unix domain sockets that only this user can open.

    folder = make_socket_dir()                  # /tmp/ddptrain-sockets-k3x9, mode 0700
    Scheduler(protocol=SCHEME, host=scheduler_path(folder), port=0)
    Client(f"unix://{scheduler_path(folder)}")

A Dask scheduler runs the code of whoever connects to it. A TCP port on 127.0.0.1 is open to every user of the machine.
Clusters that run on one machine therefore listen on unix sockets: the folder's mode keeps other users out, and both
sides check the user id of their peer before they read the first byte. Unlike TLS, this adds no time to a connection.

Dask finds this module by the entry point `distributed.comm.backends`. Source of the user id: unix(7), SO_PEERCRED.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from distributed.comm.core import BaseListener, Comm, CommClosedError, Connector, FatalCommClosedError
from distributed.comm.registry import Backend, backends
from distributed.comm.tcp import MAX_BUFFER_SIZE, TCP
from tornado.iostream import IOStream
from tornado.netutil import add_accept_handler, bind_unix_socket

from ddptrain.file_ops import why_not_private

SCHEME = "unix"
PREFIX = f"{SCHEME}://"
_HOST = "127.0.0.1"  # the host of these addresses, for processes that use IP (gloo, TCPStore)
_FOLDER = "ddptrain-sockets-"
_SCHEDULER = "scheduler"
_BACKLOG = 1024
_START_S = 60.0  # in which a scheduler has created its socket
_MAX_PARENT_BYTES = 60  # length of the parent folder's path: the kernel accepts 107 bytes for a socket's path
_numbers = itertools.count(1)


def make_socket_dir() -> Path:
    """Create a private folder for the sockets of one cluster; delete the folders of killed schedulers.

    Raises OSError.
    """
    parent = Path(tempfile.gettempdir())
    if ":" in str(parent) or len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
        parent = Path("/tmp")  # noqa: S108 - mkdtemp creates a private folder in it
    for folder in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_new = time.time() - status.st_mtime < _START_S and not (folder / _SCHEDULER).exists()
            if status.st_uid == os.geteuid() and not is_new:
                remove_dead_socket_dir(f"{PREFIX}{folder / _SCHEDULER}")
    return Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))


def scheduler_path(folder: Path) -> str:
    """Return the path of the scheduler's socket in a cluster's folder for sockets."""
    return str(folder / _SCHEDULER)


def worker_path(scheduler_address: str) -> str:
    """Return a new path for the socket of a worker, in the folder of its scheduler's socket."""
    return f"{_path(scheduler_address.removeprefix(PREFIX)).parent}/worker-{os.getpid()}-{next(_numbers)}"


def is_unix(address: str) -> bool:
    """Return whether an address has the scheme `unix`."""
    return address.startswith(PREFIX)


def remove_socket_dir(address: str) -> None:
    """Delete the folder that make_socket_dir() created for an address; ignore other addresses."""
    folder = _path(address.removeprefix(PREFIX)).parent
    if is_unix(address) and folder.name.startswith(_FOLDER) and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def remove_dead_socket_dir(address: str) -> None:
    """Delete the folder as remove_socket_dir() does, but only if no scheduler listens at the address any more."""
    try:
        connect_plain(address, 1.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        remove_socket_dir(address)
    except OSError:
        pass  # a scheduler listens, but is busy


def connect_plain(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to the socket of an address. Raises OSError, also if its peer belongs to another user."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(_path(address.removeprefix(PREFIX))))
        _check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


class UnixComm(TCP):
    """Dask's stream protocol on a unix socket."""


class UnixConnector(Connector):
    """Connects to a path, if the process that listens there belongs to this user."""

    async def connect(self, address: str, deserialize: bool = True, **_: Any) -> Comm:
        """Connect. Raises OSError if no process listens, FatalCommClosedError if a process of another user does."""
        path = _path(address)
        stream = _stream(socket.socket(socket.AF_UNIX))
        try:
            await stream.connect(str(path))
            _check_peer(stream.socket)
        except PermissionError as error:
            stream.close()
            raise FatalCommClosedError(str(error)) from error
        except BaseException:
            stream.close()
            raise
        return UnixComm(stream, f"{PREFIX}{path}#{os.getpid()}", f"{PREFIX}{path}", deserialize)


class UnixListener(BaseListener):
    """Listens on a path; closes connections of other users before it reads from them."""

    prefix = PREFIX  # Dask's worker logs it

    def __init__(
        self, address: str, comm_handler: Callable[[Comm], Any], deserialize: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.path = _path(address)
        self.comm_handler = comm_handler
        self.deserialize = deserialize
        self.allow_offload = bool(options.get("allow_offload", True))
        self._listening: socket.socket | None = None
        self._stop_accepting: Callable[[], None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the folder is missing, or other users have access to it."""
        if problem := why_not_private(self.path.parent, self.path.parent.lstat()):
            raise PermissionError(problem)
        self._listening = bind_unix_socket(str(self.path), backlog=_BACKLOG)
        self._stop_accepting = add_accept_handler(self._listening, self._accept)

    def stop(self) -> None:
        """Accept no more connections; existing ones stay open."""
        if self._stop_accepting is not None and self._listening is not None:
            self._stop_accepting()
            self._listening.close()
            self.path.unlink(missing_ok=True)
        self._stop_accepting = self._listening = None

    def _accept(self, connection: socket.socket, _: Any) -> None:
        from tornado.ioloop import IOLoop

        try:
            _check_peer(connection)
        except OSError:
            connection.close()
            return
        IOLoop.current().add_callback(self._handle, connection)

    async def _handle(self, connection: socket.socket) -> None:
        if self._listening is None:  # stopped meanwhile
            connection.close()
            return
        comm = UnixComm(
            _stream(connection), self.listen_address, f"{self.listen_address}#{next(_numbers)}", self.deserialize
        )
        comm.allow_offload = self.allow_offload
        try:
            await self.on_connection(comm)
        except CommClosedError:
            return  # closed during the handshake
        await self.comm_handler(comm)

    @property
    def listen_address(self) -> str:
        """The address to connect to."""
        return f"{PREFIX}{self.path}"

    contact_address = listen_address


class UnixBackend(Backend):
    """Registers `unix://` with Dask. Its locations are absolute paths."""

    def get_connector(self) -> Connector:
        """Return a new connector."""
        return UnixConnector()

    def get_listener(self, loc: str, handle_comm: Any, deserialize: bool, **options: Any) -> UnixListener:
        """Return a listener for a path; it has not started yet."""
        return UnixListener(loc, handle_comm, deserialize, **options)

    def get_address_host(self, loc: str) -> str:
        """Return the loopback address, because both ends are on this machine."""
        return _HOST

    def resolve_address(self, loc: str) -> str:
        """Return the path."""
        return str(_path(loc))

    get_local_address_for = resolve_address


def _path(loc: str) -> Path:
    """Return the path in an address, without ":0" (the port that Dask appends) and "#..." (the id of one end)."""
    return Path(loc.partition("#")[0].removesuffix(":0"))


class _UnixSocket(socket.socket):
    """A unix socket that ignores the TCP options that Dask sets on every connection."""

    def setsockopt(self, level: int, *args: Any) -> None:
        if level != socket.SOL_TCP:
            super().setsockopt(level, *args)


def _stream(connection: socket.socket) -> IOStream:
    return IOStream(_UnixSocket(fileno=connection.detach()), max_buffer_size=MAX_BUFFER_SIZE)


def _check_peer(connection: socket.socket) -> None:
    """Raise PermissionError if the process at the other end belongs to another user, except root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user not in {os.geteuid(), 0}:
        raise PermissionError(f"the process at the other end belongs to user {user}, not to user {os.geteuid()}")


backends[SCHEME] = cast(Backend, UnixBackend())
