"""What `ddptrain doctor` reads of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


def test_server_that_refuses_is_reachable_and_has_a_clock(server: str) -> None:
    ahead_s = time.time() - 978307200.0
    assert machine.ask_server(server) == machine.Answer(server, "", pytest.approx(ahead_s, abs=60.0))


def test_server_that_is_away_is_named_without_its_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = machine.ask_server(f"http://me:passw0rd@127.0.0.1:{port}/x")
    assert answer.error == "Connection refused" and "passw0rd" not in answer.url
    assert machine.ask_server("ftp://x").error.startswith("it is not a URL")


def test_loopback_works() -> None:
    assert machine.check_ports() == Check("ports", Result.OK, "a connection to 127.0.0.1 works")
