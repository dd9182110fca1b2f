"""Errors of stores that fsspec opens: a server that can't be reached is not a missing file."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from unittest import mock

import pytest
from aiohttp import ClientConnectorError

from ddptrain.storage.fsspec_store import FsspecStore
from ddptrain.storage.store import Location, NotFound, StoreForbidden, StoreUnreachable, Transient, open_store


def at(url: str) -> Location:
    return Location.of(url, {}, "params.names")


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_server_that_refuses_is_named(closed_port: int) -> None:
    place = f"127.0.0.1:{closed_port}"
    store = open_store(at(f"http://{place}/names.txt"))
    with pytest.raises(StoreUnreachable, match=rf"can't be read: {place} refuses the connection: is the server up"):
        b"".join(store.chunks(""))
    with pytest.raises(Transient, match="refuses the connection"):
        store.get("dogs.txt")


def test_unknown_host_is_named() -> None:
    key = SimpleNamespace(host="no-such-host", port=80, is_ssl=False, ssl=True)
    error = FileNotFoundError("http://no-such-host/x")
    error.__cause__ = ClientConnectorError(key, socket.gaierror(-2, "Name or service not known"))  # type: ignore[arg-type]
    with pytest.raises(StoreUnreachable, match="the host no-such-host is unknown: is the URL right"):
        _reading(error).get("")


def test_missing_file_stays_missing() -> None:
    with pytest.raises(NotFound):
        _reading(FileNotFoundError("http://host/x")).get("x")


def test_refused_file_is_not_missing() -> None:
    error = FileNotFoundError("http://host/x")
    error.__cause__ = _Status(403)
    with pytest.raises(StoreForbidden, match="403"):
        _reading(error).get("x")
    error.__cause__ = _Status(404)
    with pytest.raises(NotFound):
        _reading(error).get("x")


class _Status(Exception):
    """As aiohttp.ClientResponseError."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status, self.message = status, "said the server"


def _reading(error: Exception) -> FsspecStore:
    """A store whose file system raises this error."""
    fs = mock.Mock()
    fs.cat_file.side_effect = error
    return FsspecStore(at("http://host"), fs, "http://host", 5.0)
