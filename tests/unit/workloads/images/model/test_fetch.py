"""Weights of torchvision are fetched once for a host, whole or not at all."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddptrain.workloads.images.model import fetch

CONTENT = b"weights" * 100_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()[:8]


class Web(ThreadingHTTPServer):
    """Serves CONTENT at any path; /missing is not there, /flaky fails once, /short and /broken always."""

    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path == "/missing" or self.path == "/broken":
            self.send_error(404 if self.path == "/missing" else 503)
        elif self.path == "/flaky" and self.server.asked.count(self.path) == 1:
            self.send_error(503)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:1000] if self.path == "/short" else CONTENT)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    with Web(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetched(url: str, path: Path) -> Path:
    fetch(url, path, lambda *_: None)
    return path


def test_file_is_fetched_once_however_many_want_it(web: Web, tmp_path: Path) -> None:
    path = tmp_path / "hub" / "w.pth"
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(fetched, f"{web.url}/w.pth", path).result() for _ in range(4)]
    assert {one.read_bytes() for one in found} == {CONTENT}
    assert web.asked == ["/w.pth"]
    assert sorted(file.name for file in path.parent.iterdir()) == [".w.pth.lock", "w.pth"]


def test_server_that_fails_for_a_moment_is_asked_again(web: Web, tmp_path: Path) -> None:
    assert fetched(f"{web.url}/flaky", tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "said", "asked"), [("/missing", "404", 1), ("/broken", "503", 3), ("/short", "ended", 3)]
)
def test_what_cannot_be_had_leaves_nothing_behind(web: Web, tmp_path: Path, path: str, said: str, asked: int) -> None:
    with pytest.raises(OSError, match=said):
        fetched(f"{web.url}{path}", tmp_path / "a")
    assert len(web.asked) == asked
    assert not (tmp_path / "a").exists()


def test_content_must_be_what_the_name_promises(web: Web, tmp_path: Path) -> None:
    fetched(web.url, tmp_path / f"model-{DIGEST}.pth")
    with pytest.raises(OSError, match="is damaged: its SHA-256 is"):
        fetched(web.url, tmp_path / "model-0123abcd.pth")
    assert not (tmp_path / "model-0123abcd.pth").exists()
