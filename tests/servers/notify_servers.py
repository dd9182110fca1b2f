"""Servers on loopback that get notifications: a web server, a check server like healthchecks.io, and silent ones."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the server got it."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: str


class WebServer(ThreadingHTTPServer):
    """Keeps all requests. The first requests get the answers in `statuses`, later ones 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Request] = []
        self.statuses: list[int] = []

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_port}"

    def answer(self, request: Request) -> tuple[int, bytes]:
        """Keep the request, and return the status and the body of the answer."""
        self.requests.append(request)
        return (self.statuses.pop(0) if self.statuses else 200), b"OK"


class CheckServer(WebServer):
    """A check of healthchecks.io's protocol: `state` is new, started, up or down.

    It is down after a failure, if a run lasts longer than `grace_s`, and if there is no success for `period_s` and
    `grace_s`. A log entry changes nothing.
    """

    def __init__(self, period_s: float = 60, grace_s: float = 60) -> None:
        super().__init__()
        self.period_s, self.grace_s = period_s, grace_s
        self.pings: list[tuple[str, str, str]] = []  # kind, rid, body
        self._state, self._deadline = "new", float("inf")

    @property
    def url(self) -> str:
        """The ping URL."""
        return f"http://{self.address}/ping/3f1c6a52-secret-uuid"

    @property
    def state(self) -> str:
        """The state now."""
        return "down" if time.monotonic() > self._deadline else self._state

    def answer(self, request: Request) -> tuple[int, bytes]:
        """Change the state as the request says."""
        status, body = super().answer(request)
        parts = request.path.strip("/").split("/")
        if parts[:2] != ["ping", "3f1c6a52-secret-uuid"] or len(parts) > 3:
            return 404, b"not found"
        kind = parts[2] if len(parts) == 3 else "success"
        if status == 200:
            self.pings.append((kind, request.query["rid"][0], request.body))
            self._change("success" if kind == "0" else kind)
        return status, body

    def _change(self, kind: str) -> None:
        now = time.monotonic()
        if kind == "start":
            self._state, self._deadline = "started", now + self.grace_s
        elif kind == "success":
            self._state, self._deadline = "up", now + self.period_s + self.grace_s
        elif kind != "log":
            self._state, self._deadline = "down", float("inf")


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        parts = urlsplit(self.path)
        request = Request(parts.path, parse_qs(parts.query), dict(self.headers.items()), body)
        status, answer = self.server.answer(request)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serving(server: WebServer) -> Iterator[None]:
    """Let the server answer while the block runs."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(slots=True)
class SilentServer:
    """Accepts connections and never answers; with `drips` it sends a byte now and then, so that no read times out."""

    drips: bool = False
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _connections: list[socket.socket] = field(default_factory=list)
    _is_closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> int:
        """How many connections it has accepted."""
        return len(self._connections)

    def __enter__(self) -> Self:
        self._listener.settimeout(0.05)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        if self._thread:
            self._thread.join()
        for each in (*self._connections, self._listener):
            each.close()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(TimeoutError):
                self._connections.append(self._listener.accept()[0])
                if self.drips:
                    self._connections[-1].sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
            for each in self._connections if self.drips else ():
                with contextlib.suppress(OSError):
                    each.sendall(b"x")
