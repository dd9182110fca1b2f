"""What `ddptrain doctor` reads of this machine."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.doctor import machine
from ddptrain.driver.doctor.judge import Check, Result


class Late(BaseHTTPRequestHandler):
    """A server that refuses each request, and whose clock stands still in 2001."""

    def do_HEAD(self) -> None:
        self.send_response_only(403)
        self.send_header("Date", "Mon, 01 Jan 2001 00:00:00 GMT")
        self.end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Late) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def test_server_that_refuses_is_reachable_and_has_a_clock(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([978307200.0 + 20.0, 978307200.0 + 22.0])  # the answer takes 2 s: it was sent in the middle of them
    monkeypatch.setattr(machine, "time", SimpleNamespace(time=lambda: next(times)))
    assert machine.ask_server(server) == machine.Answer(server, "", 20.5)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(113, "No route to host"), "No route to host"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (urllib.error.URLError("unknown\nthing"), "unknown"),
        (HTTPException("odd"), "odd"),
        (None, ""),
    ],
)
def test_server_is_asked_for_its_headers_only_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, told: str
) -> None:
    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        assert (request.full_url, request.get_method(), timeout) == ("https://h:1/x", "HEAD", 3.0)
        if error is not None:
            raise error
        return nullcontext(SimpleNamespace(headers={}))

    monkeypatch.setattr(machine.urllib.request, "urlopen", urlopen)  # type: ignore[attr-defined]
    assert machine.ask_server("https://h:1/x") == machine.Answer("https://h:1/x", told)


def test_server_that_is_away_is_named_without_its_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = machine.ask_server(f"http://me:passw0rd@127.0.0.1:{port}/x")
    assert answer.error == "Connection refused" and "passw0rd" not in answer.url
    assert machine.ask_server("ftp://x").error.startswith("it is not a URL")


def test_loopback_works() -> None:
    assert machine.check_ports() == Check("ports", Result.OK, "a connection to 127.0.0.1 works")
