"""Checks whether a Dask scheduler listens at an address, without Dask, which trusts the first bytes of any peer.

A Dask scheduler sends the first message. Dask reads its length and allocates as many bytes. Read as a length, the
greeting of an SSH server is 3 exabytes.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

from ddptrain.config.wording import shorten
from ddptrain.errors import ClusterError

SILENT = "something accepts the connection, but sends nothing"
_GREETING_S = 1.0
_HTTP_S = 1.5
_MAX_GREETING = 1 << 16  # bytes; Dask's has 66
_LENGTH = struct.Struct("<Q")
_NAMES = (b"compression", b"pickle-protocol")  # in Dask's greeting
_QUOTED = 60  # characters


def check_greeting(address: str, host: str, port: int) -> None:
    """Read the first message of the peer. A peer that sends nothing passes, because a busy scheduler is late.

    Raises OSError if there is no connection, and ClusterError if the greeting is not that of a Dask scheduler.
    """
    with socket.create_connection((host, port), timeout=_GREETING_S) as connection:
        greeting = _read(connection, _GREETING_S)
    if is_not_dask(greeting):
        raise ClusterError(f"{not_a_scheduler(address)}: it {_quoted(greeting)}")


def check_http(address: str, host: str, port: int) -> None:
    """Ask a silent peer whether it is a web server. Raises OSError without a connection, ClusterError if it is one."""
    with socket.create_connection((host, port), timeout=_HTTP_S) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = _read(connection, _HTTP_S)
    if answer.startswith(b"HTTP/"):
        raise ClusterError(f"{not_a_scheduler(address)}: it uses HTTP: is that the port of Dask's dashboard?")


def is_not_dask(greeting: bytes) -> bool:
    """Return whether these bytes cannot be the greeting of a Dask scheduler, or its beginning.

    The greeting is the length of the rest, which is small, then the number of frames, their lengths, and MessagePack.
    """
    if any(greeting[3:8]):
        return True
    if len(greeting) < _LENGTH.size:
        return False
    (length,) = _LENGTH.unpack_from(greeting)
    is_complete = len(greeting) >= _LENGTH.size + length
    return not 0 < length <= _MAX_GREETING or (is_complete and not any(name in greeting for name in _NAMES))


def not_a_scheduler(address: str) -> str:
    """Return the beginning of the error message for an address without a Dask scheduler."""
    return f"what listens at {address} is not a Dask scheduler"


def _read(connection: socket.socket, timeout_s: float) -> bytes:
    """Read until the bytes identify the peer, the peer closes the connection, or the time is over; return the bytes."""
    data, deadline = b"", time.monotonic() + timeout_s
    with suppress(OSError):  # also TimeoutError: the bytes so far count
        while not is_not_dask(data) and not any(name in data for name in _NAMES):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (block := connection.recv(4096)):
                break
            data += block
    return data


def _quoted(greeting: bytes) -> str:
    """Return text with the first line of a greeting, or its first bytes if it is not text."""
    line = greeting.splitlines()[0].decode("utf-8", "replace")
    if line and line.isprintable() and "\N{REPLACEMENT CHARACTER}" not in line:
        return f'says "{shorten(line, _QUOTED)}"'
    return f"sends other bytes ({greeting[:8].hex(' ')} ...)"
