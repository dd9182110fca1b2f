"""What `ddptrain doctor` reads of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ddptrain.driver.doctor import machine
from ddptrain.driver.doctor.judge import Result, TorchFacts


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
    answer = machine.ask_server(server)
    assert answer.error == "" and answer.clock_ahead_s is not None and answer.clock_ahead_s > 700_000_000


def test_server_that_is_away_is_named_without_its_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = machine.ask_server(f"http://me:passw0rd@127.0.0.1:{port}/x")
    assert answer.error == "Connection refused" and "passw0rd" not in answer.url
    assert machine.ask_server("ftp://x").error.startswith("it is not a URL")


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, []),
        ({"WANDB_API_KEY": "k" * 40}, ["https://api.wandb.ai"]),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "https://w", "WANDB_MODE": "offline"}, []),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://s"}, ["http://s"]),
    ],
)
def test_only_servers_that_are_configured_are_asked(
    environ: dict[str, str], asked: list[str], tmp_path: object
) -> None:
    assert machine._servers({"HOME": str(tmp_path), **environ}) == asked


def test_process_that_fails_is_a_problem() -> None:
    assert machine._decoded(TorchFacts, "", "No module named torch") == (None, "No module named torch")
    assert machine._decoded(TorchFacts, "", "")[0] is None
    found, _ = machine._decoded(TorchFacts, 'a warning\n{"torch": "2.9"}', "")
    assert found == TorchFacts("2.9")


def test_loopback_works() -> None:
    assert machine.check_ports().result == Result.OK
