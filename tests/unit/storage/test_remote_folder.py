"""Folders in stores of any kind."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.exceptions import PermissionDeniedError

from ddptrain.errors import ExitCode, RunLocked, UsageError
from ddptrain.storage.remote_folder import RemoteFolder, is_plain, is_url
from ddptrain.storage.store import (
    Location,
    StoreError,
    StoreForbidden,
    StoreUnreachable,
    TooLarge,
    Transient,
    open_store,
)
from tests.unit.results.stores import watched_store

# --- A folder of a store: what is tried again, what is limited, and which errors the user gets ---


def test_write_is_tried_again_after_an_error_that_may_pass() -> None:
    store, fs = watched_store()
    fs.errors = [OSError("reset by peer"), TimeoutError()]
    store.write("a/b", b"1")
    assert store.read("a/b") == b"1"


def test_error_that_stays_is_one_line_with_the_address() -> None:
    store, fs = watched_store()
    fs.errors = [OSError("reset\nby peer")] * 3
    with pytest.raises(Transient, match=rf"^{store.url}/a/b can't be written: reset"):
        store.write("a/b", b"1")
    assert not fs.errors, "two retries"


def test_refusal_is_not_tried_again() -> None:
    store, fs = watched_store()
    fs.errors = [PermissionDeniedError("no"), OSError("never asked")]
    with pytest.raises(StoreForbidden, match="no") as refused:
        store.write("a", b"1")
    assert len(fs.errors) == 1 and refused.value.exit_code == ExitCode.USAGE


def test_no_attempt_follows_once_there_is_no_time() -> None:
    store, fs = watched_store()
    fs.errors = [OSError("away"), OSError("never asked")]
    waits: list[float] = []

    def is_over(seconds: float) -> bool:
        waits.append(seconds)
        return True

    hurried = replace(store, pauses_s=(7.0, 8.0), wait=is_over)
    with pytest.raises(StoreUnreachable, match="can't be listed: away"):
        hurried.folders()
    assert (waits, len(fs.errors)) == ([7.0], 1)


def test_file_that_is_missing_is_none() -> None:
    store, _ = watched_store()
    store.remove("none")
    store.write("a/there", b"1")
    assert store.read("none") is None
    assert store.read_all(["none", "a/there"]) == {"a/there": b"1"}
    assert (store.folders(), list(store.files())) == (["a"], ["a/there"])
    assert (store.below("none").folders(), store.below("none").files()) == ([], {})
    store.write("a/b/deep", b"22")
    assert store.below("a").folders() == ["b"]
    assert {path: file.size_bytes for path, file in store.below("a").files("b").items()} == {"b/deep": 2}


def test_small_file_that_is_huge_is_refused() -> None:
    store, _ = watched_store()
    store.write("run.lock", b"x" * 1001)
    assert store.read("run.lock", limit_bytes=1001) == b"x" * 1001
    with pytest.raises(TooLarge, match=r"run\.lock can't be read: it has more than 1,000 bytes"):
        store.read("run.lock", limit_bytes=1000)


def test_guard_is_asked_before_each_change_and_no_read() -> None:
    store, fs = watched_store()
    store.write("there", b"1")
    fs.writes.clear()

    def refuse() -> None:
        raise RunLocked("taken")

    guarded = replace(store, guard=refuse).below("")
    for change in (
        lambda: guarded.write("x", b""),
        lambda: guarded.remove("there"),
        lambda: guarded.write_versioned("x", b"", None),
    ):
        with pytest.raises(RunLocked):
            change()
    assert not fs.writes and replace(store, guard=refuse).read("there") == b"1"


def test_files_go_there_and_come_back(tmp_path: Path) -> None:
    store, _ = watched_store()
    (tmp_path / "here").write_bytes(b"12345")
    store.write("x/y", tmp_path / "here")
    store.fetch("x/y", tmp_path / "deep/copy")
    assert (tmp_path / "deep/copy").read_bytes() == b"12345"
    with pytest.raises(StoreError):
        store.fetch("x/none", tmp_path / "deep/none")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


def test_disk_that_takes_no_download_is_named(tmp_path: Path) -> None:
    store, _ = watched_store()
    store.write("x", b"1")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"{store.url}/x can't be downloaded: cannot write {tmp_path}/file/x: "):
        store.fetch("x", tmp_path / "file" / "x")


@pytest.mark.parametrize("path", ["", "/", "a//b", "../a", "a/..", "./a", "a\\b", "a\nb"])
def test_path_that_leads_elsewhere_is_not_plain(path: str) -> None:
    assert not is_plain(path) and is_plain("a/b c/..d")


@pytest.mark.parametrize(("text", "is_one"), [("s3://b/c", True), ("runs", False), ("/a//b", False), ("C:\\x", False)])
def test_address_is_known_by_its_scheme(text: str, is_one: bool) -> None:
    assert is_url(text) is is_one


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s5://b/c", "cannot keep runs or models in s5://b/c: give a path, or a bucket of S3, "),
        ("file:///tmp/runs", "give a path"),
        ("s3://", "give a bucket or a folder"),
    ],
)
def test_address_that_leads_nowhere_is_a_usage_error(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RemoteFolder.open(url)


# --- Errors of stores that fsspec opens: a server that can't be reached is not a missing file ---


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
