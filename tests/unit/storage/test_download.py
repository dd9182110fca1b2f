"""Weights of torchvision: once for a host, whole or not at all, and a clear word where they can't be had."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddptrain.workloads.images.model import initial_weights
from ddptrain.workloads.images.model.initial_weights import DownloadFailed, fetch_file
from ddptrain.workloads.images.model.preflight import BadWeights, weights_path

CONTENT = b"weights" * 100_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()[:8]


ENDLESS = ("/drip", "/flood")
LENGTHS = {"/word": "many", "/minus": "-5", "/huge": str(10**15), "/long": "9" * 5000}


class Web(ThreadingHTTPServer):
    """Serves CONTENT at any path; /missing is not there, /flaky fails once, /short and /broken always."""

    asked: list[str]
    headers: list[str]
    over: threading.Event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.headers.append(self.headers.get("Authorization", ""))
        if self.path == "/missing" or self.path == "/broken":
            self.send_error(404 if self.path == "/missing" else 503)
        elif self.path == "/flaky" and self.server.asked.count(self.path) == 1:
            self.send_error(503)
        elif self.path.startswith("/to/"):
            port, slash, _ = self.path.removeprefix("/to/").partition("/")
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{port}{self.path if slash else '/a'}")
            self.end_headers()
        elif self.path in ENDLESS:
            self.endless()
        else:
            self.send_response(200)
            self.send_header("Content-Length", LENGTHS.get(self.path, str(len(CONTENT))))
            self.end_headers()
            self.wfile.write(CONTENT[:1000] if self.path == "/short" else CONTENT)

    def endless(self) -> None:
        """A byte now and then, or as many as are taken, until the client goes."""
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.over.wait(0.01 if self.path == "/drip" else 0.0):
                self.wfile.write(b"x" if self.path == "/drip" else CONTENT)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_weights, "_PAUSE_S", 0.0)


@pytest.fixture
def web() -> Iterator[Web]:
    with Web(("127.0.0.1", 0), Handler) as server:
        server.asked, server.headers, server.over = [], [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def fetched(url: str, path: Path) -> Path:
    return fetch_file(url, path, progress=lambda *_: None, tell=lambda _: None)


def test_file_is_fetched_once_however_many_want_it(web: Web, tmp_path: Path) -> None:
    path = tmp_path / "hub" / "w.pth"
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(fetched, f"{web.url}/w.pth", path).result() for _ in range(4)]
    assert {one.read_bytes() for one in found} == {CONTENT}
    assert web.asked == ["/w.pth"]
    assert sorted(file.name for file in path.parent.iterdir()) == [".w.pth.lock", "w.pth"]


@pytest.mark.usefixtures("no_pause")
def test_server_that_fails_for_a_moment_is_asked_again(web: Web, tmp_path: Path) -> None:
    assert fetched(f"{web.url}/flaky", tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    ("path", "said", "asked"), [("/missing", "answers 404", 1), ("/broken", "answers 503", 3), ("/short", "ended", 3)]
)
def test_what_cannot_be_had_leaves_nothing_behind(web: Web, tmp_path: Path, path: str, said: str, asked: int) -> None:
    with pytest.raises(DownloadFailed, match=said):
        fetched(f"{web.url}{path}", tmp_path / "a")
    assert len(web.asked) == asked
    assert [file.name for file in tmp_path.iterdir()] == [".a.lock"]


def test_content_must_be_what_the_name_promises(web: Web, tmp_path: Path) -> None:
    fetched(web.url, tmp_path / f"model-{DIGEST}.pth")
    with pytest.raises(DownloadFailed, match="is damaged: its SHA-256 is"):
        fetched(web.url, tmp_path / "model-0123abcd.pth")
    assert not (tmp_path / "model-0123abcd.pth").exists()


def test_weights_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=r"there are no weights /nowhere/w\.pth"):
        weights_path("/nowhere/w.pth")
    with pytest.raises(BadWeights, match="is a folder: name the file in it"):
        weights_path(str(tmp_path))
