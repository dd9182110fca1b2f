"""Messages and heartbeats that are sent."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ddptrain.notify.heartbeat import Heartbeat, ping_url
from ddptrain.notify.sender import Message, missing_variables, secret_parts, send

# --- The URLs of the messages, what is refused, and that no secret is in a warning ---


@pytest.mark.parametrize(
    ("url", "suffix", "expected"),
    [
        ("https://hc-ping.com/uuid", "start", "https://hc-ping.com/uuid/start?rid=R"),
        ("https://hc-ping.com/uuid", "", "https://hc-ping.com/uuid?rid=R"),
        ("https://hc-ping.com/uuid/", "fail", "https://hc-ping.com/uuid/fail?rid=R"),
        ("https://hc-ping.com/key/slug?create=1", "7", "https://hc-ping.com/key/slug/7?create=1&rid=R"),
        ("https://hc-ping.com/key/slug/?create=1&x=", "log", "https://hc-ping.com/key/slug/log?create=1&x=&rid=R"),
        ("https://hc-ping.com/uuid#fragment", "", "https://hc-ping.com/uuid?rid=R"),
        ("http://[::1]:8000/ping/uuid", "start", "http://[::1]:8000/ping/uuid/start?rid=R"),
        ("http://host", "start", "http://host/start?rid=R"),
    ],
)
def test_suffix_joins_the_path_and_the_run_joins_the_query(url: str, suffix: str, expected: str) -> None:
    assert ping_url(url, suffix, "R") == expected


@pytest.mark.parametrize(
    ("url", "environ", "problem"),
    [
        ("env:HB", {}, "heartbeat not delivered to env:HB: the environment variable HB is not set"),
        ("env:HB", {"HB": "file:///etc/secret"}, "heartbeat not delivered to env:HB: it is not a URL that begins with"),
        ("env:HB", {"HB": "https://host:99999/secret"}, "heartbeat not delivered to env:HB: it is not a URL"),
        ("https://", {}, "heartbeat not delivered to notify.heartbeat: it is not a URL"),
    ],
)
def test_url_that_cannot_be_used_is_a_warning(
    url: str, environ: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    beat = Heartbeat(url)
    beat.begin()
    beat.end(0)
    (warning,) = beat.warnings
    assert warning.startswith(problem)
    assert "secret" not in warning


def test_secret_at_the_end_of_a_long_title_is_not_sent_in_part() -> None:
    got: list[bytes] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    message = Message.of("run", "x" * 108 + " my-secret-word and more", "", [])
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (delivery,) = send(message, [f"json://127.0.0.1:{server.server_port}"], secrets=["my-secret-word"])
        server.shutdown()
    assert delivery.delivered and b"my-sec" not in got[0] and b"xxx" in got[0]


def test_password_is_not_sent_to_the_server_that_the_check_server_redirects_to() -> None:
    got: list[tuple[str, str | None]] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.headers["Authorization"]))
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{port}/other")
            self.end_headers()

        def do_GET(self) -> None:
            got.append((self.path, self.headers["Authorization"]))
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Redirecting) as site:

        def answer_twice() -> None:
            site.handle_request()
            site.handle_request()

        port = site.server_port
        answering = threading.Thread(target=answer_twice)
        answering.start()
        Heartbeat(f"http://user:word@127.0.0.1:{port}/ping").end(0)
        answering.join()
    assert [(path.partition("?")[0], word) for path, word in got] == [("/ping", "Basic dXNlcjp3b3Jk"), ("/other", None)]


# --- Targets: missing variables, and the parts of a URL that are secret. The delivery is in test_servers.py ---


def test_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B_URL", " ")
    found = send(Message("title", "body"), ["env:A_URL", "env:B_URL"], timeout_s=1)
    assert [each.warning for each in found] == [
        "message not delivered to env:A_URL: the environment variable A_URL is not set; it should contain a URL",
        "message not delivered to env:B_URL: the environment variable B_URL is empty; it should contain a URL",
    ]
    assert missing_variables(["env:A_URL", "json://host", "env:A_URL"]) == [
        "the environment variable A_URL is not set; it should contain a URL"
    ]


def test_parts_of_a_url_are_secret_except_its_scheme() -> None:
    found = secret_parts("tgram://123456:ab%20cdef/chat1?format=text")
    assert {"123456", "ab%20cdef", "ab cdef", "chat1", "tgram://123456:ab%20cdef/chat1?format=text"} <= set(found)
    assert "tgram" not in found
    assert found == sorted(found, key=len, reverse=True)
    assert secret_parts("") == []
