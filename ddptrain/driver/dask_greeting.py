"""Finds out what listens at an address, if it is not a Dask scheduler, without Dask, which trusts the first bytes.

A Dask scheduler speaks first. Dask reads the length of that message and allocates as many bytes, whoever sent it: the
greeting of an SSH server is a length of 3 exabytes.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

from ddptrain.config.wording import shown
from ddptrain.errors import ClusterError

SILENT = "somebody takes the connection there, and says nothing"
_GREETING_S = 1.0
_HTTP_S = 1.5
_LONGEST_GREETING = 1 << 16  # bytes; Dask's has 66
_LENGTH = struct.Struct("<Q")
_NAMES = (b"compression", b"pickle-protocol")  # in Dask's greeting
_QUOTED = 60  # characters


def check_greeting(address: str, host: str, port: int) -> None:
    """Read what the peer says first. A peer that says nothing passes: a busy scheduler is late.

    Raises: OSError if there is no connection; ClusterError if the greeting is not that of a Dask scheduler.
    """
    with socket.create_connection((host, port), timeout=_GREETING_S) as connection:
        greeting = _read(connection, _GREETING_S)
    if is_not_dask(greeting):
        raise ClusterError(f"{not_a_scheduler(address)}: it {_quoted(greeting)}")


def check_http(address: str, host: str, port: int) -> None:
    """Ask a peer that says nothing whether it is a web server. Raises OSError; ClusterError if it is one."""
    with socket.create_connection((host, port), timeout=_HTTP_S) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = _read(connection, _HTTP_S)
    if answer.startswith(b"HTTP/"):
        raise ClusterError(f"{not_a_scheduler(address)}: it speaks HTTP, as Dask's dashboard does on a port of its own")


def is_not_dask(greeting: bytes) -> bool:
    """Whether these bytes can't be, or begin, the greeting of a Dask scheduler.

    That is the length of the rest, which is small, then the number of frames, their lengths, and MessagePack.
    """
    if any(greeting[3:8]):
        return True
    if len(greeting) < _LENGTH.size:
        return False
    (length,) = _LENGTH.unpack_from(greeting)
    is_complete = len(greeting) >= _LENGTH.size + length
    return not 0 < length <= _LONGEST_GREETING or (is_complete and not any(name in greeting for name in _NAMES))


def not_a_scheduler(address: str) -> str:
    """The beginning of the message for all that listens there and is something else."""
    return f"what listens at {address} is not a Dask scheduler"


def _read(connection: socket.socket, timeout_s: float) -> bytes:
    """What the peer sends until it is known what it is, the peer closes the connection, or the time is over."""
    data, deadline = b"", time.monotonic() + timeout_s
    with suppress(OSError):  # also TimeoutError: what has come counts
        while not is_not_dask(data) and not any(name in data for name in _NAMES):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (block := connection.recv(4096)):
                break
            data += block
    return data


def _quoted(greeting: bytes) -> str:
    """The first line of a text, or the first bytes of something else."""
    line = greeting.splitlines()[0].decode("utf-8", "replace")
    if line and line.isprintable() and "\N{REPLACEMENT CHARACTER}" not in line:
        return f'says "{shown(line, _QUOTED)}"'
    return f"sends other bytes ({greeting[:8].hex(' ')} ...)"
