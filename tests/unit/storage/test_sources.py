"""Places that hold images: folders, what fsspec knows, and what obstore is told about object stores."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ddptrain.errors import ExitCode, UsageError
from ddptrain.storage.sources import fetch, open_source
from ddptrain.storage.store import (
    Location,
    NotFound,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
)

HARD_NAMES = ("x y/a b.jpg", "ü/é+1.jpg", "p%20q/100%.jpg", "h#s/q?m.jpg", "br[1]/~t*{}.jpg", "犬/犬.jpg")


# --- locations ---


def at(source: str, **options: Any) -> Location:
    return Location.of(source, options)


@pytest.mark.parametrize(
    ("source", "url", "protocol"),
    [
        ("s3://bucket/prefix/", "s3://bucket/prefix", "s3"),
        ("S3://bucket/a b//", "s3://bucket/a b", "s3"),
        ("/data/dogs/", "/data/dogs", "file"),
        ("file:///data/dogs", "/data/dogs", "file"),
        ("builtin", "builtin", "builtin"),
    ],
)
def test_a_source_is_written_in_one_way(source: str, url: str, protocol: str) -> None:
    assert (at(source).url, at(source).protocol) == (url, protocol)


def test_a_path_is_relative_to_the_working_directory_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert at("dogs").url == str(tmp_path / "dogs")
    assert at("~/dogs").url == "/home/me/dogs"


def test_no_library_that_must_not_be_forked_is_loaded_before_a_store_is_opened() -> None:
    code = "import ddptrain.workloads.images.listing, sys; print({'torch', 'obstore', 'fsspec'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == "set()", said.stderr


# --- folders ---


def test_a_folder_is_listed_and_read_whatever_its_files_are_called(tmp_path: Path) -> None:
    for name in HARD_NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    store = open_source(at(str(tmp_path)))
    listed = list(store.listing())
    assert sorted(item.key for item in listed) == sorted(HARD_NAMES)
    assert all(
        store.get(item.key) == item.key.encode() and item.size_bytes == len(item.key.encode()) for item in listed
    )


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.jpg").write_bytes(b"1")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "source")
    assert [item.key for item in open_source(at(str(tmp_path / "source"))).listing()] == ["a/1.jpg"]


@pytest.mark.parametrize(("path", "words"), [("none", "does not exist"), ("file", "is not a folder")])
def test_a_folder_that_is_none_is_missing(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreMissing, match=f"{tmp_path}/{path} {words}") as caught:
        list(open_source(at(str(tmp_path / path))).listing())
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_file_that_has_gone_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(NotFound) as caught:
        open_source(at(str(tmp_path))).get("a/1.jpg")
    assert caught.value.key == "a/1.jpg"


def test_a_folder_that_a_host_does_not_see_is_told_instead_of_its_images(tmp_path: Path) -> None:
    with pytest.raises(
        StoreMissing, match=rf"the folder {tmp_path}/none does not exist on .*: every rank must be able to read it"
    ):
        open_source(at(str(tmp_path / "none"))).get("a/1.jpg")


def test_one_file_is_fetched_by_its_path_or_url(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_bytes(b"tench")
    assert fetch(str(tmp_path / "names.txt"), {}, "params.names", 10) == b"tench"
    fsspec.filesystem("memory").pipe_file("/fetched/names.txt", b"tench")
    assert fetch("memory://fetched/names.txt", {}, "params.names", 10) == b"tench"
    with pytest.raises(StoreMissing, match=r"none\.txt does not exist"):
        fetch(str(tmp_path / "none.txt"), {}, "params.names", 10)


# --- what fsspec knows ---


def test_a_file_system_of_fsspec_is_listed_and_read() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/pets/{name}": name.encode() for name in HARD_NAMES})
    store = open_source(at("memory://pets"))
    assert sorted(item.key for item in store.listing()) == sorted(HARD_NAMES)
    assert store.get(HARD_NAMES[2]) == HARD_NAMES[2].encode()
    with pytest.raises(NotFound):
        store.get("x y/none.jpg")
    with pytest.raises(StoreMissing, match="memory://nothing"):
        list(open_source(at("memory://nothing")).listing())


class Quiet(SimpleHTTPRequestHandler):
    failing = 0

    def do_GET(self) -> None:
        if "secret" in self.path:
            self.send_error(403)
        elif Quiet.failing:
            Quiet.failing -= 1
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_pages_of_links_are_listed_and_read_and_a_bad_moment_is_passed_over(tmp_path: Path) -> None:
    for name in HARD_NAMES:
        (tmp_path / "dogs" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "dogs" / name).write_bytes(name.encode())
    with serving(functools.partial(Quiet, directory=tmp_path)) as url:
        store = open_source(at(f"{url}/dogs/"))
        Quiet.failing = 1
        assert sorted(item.key for item in store.listing()) == sorted(HARD_NAMES)
        assert all(store.get(name) == name.encode() for name in HARD_NAMES)
        Quiet.failing = 1
        with pytest.raises(Transient, match="503"):
            store.get(HARD_NAMES[0])
        with pytest.raises(NotFound):
            store.get("x y/none.jpg")
        with pytest.raises(StoreMissing, match="/none does not exist"):
            list(open_source(at(f"{url}/none")).listing())
        with pytest.raises(StoreForbidden, match="403"):
            list(open_source(at(f"{url}/secret")).listing())
        Quiet.failing = 99  # a folder that can't be listed is no empty one
        with pytest.raises(StoreUnreachable, match="503"):
            list(store.listing())
        Quiet.failing = 0


class Endless(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        with suppress(OSError):
            while True:
                self.wfile.write(bytes(100_000))

    def log_message(self, *_: object) -> None: ...


def test_small_file_without_end_is_cut_off() -> None:
    with serving(Endless) as url:
        assert 1_000_000 < len(fetch(f"{url}/names.txt", {}, "params.names", 1_000_000)) < 20_000_000


def test_server_that_refuses_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    store = open_source(at(f"http://{place}/names.txt"))
    with pytest.raises(StoreUnreachable, match=rf"can't be read: Cannot connect to host {place}"):
        b"".join(store.chunks(""))
    with pytest.raises(Transient, match="Cannot connect"):
        store.get("dogs.txt")


def test_an_unknown_protocol_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match=r"params\.source nonsense://x can't be opened: ValueError"):
        open_source(at("nonsense://x"))
