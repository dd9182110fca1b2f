from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.errors import StoreError
from ddptrain.results.remote.store import Store, is_url
from tests.unit.results.stores import watched_store


def test_write_is_tried_again_after_an_error_that_may_pass() -> None:
    store, fs = watched_store()
    fs.errors = [OSError("reset by peer"), TimeoutError()]
    store.write("a/b", b"1")
    assert store.read("a/b") == b"1"


def test_error_that_stays_is_one_line_with_the_address() -> None:
    store, fs = watched_store()
    fs.errors = [OSError("reset\nby peer")] * 3
    with pytest.raises(StoreError, match=rf"^cannot write {store.url}/a/b: reset by peer$"):
        store.write("a/b", b"1")


def test_refusal_is_not_tried_again() -> None:
    store, fs = watched_store()
    fs.errors = [PermissionError("no"), OSError("never asked")]
    with pytest.raises(StoreError, match="no"):
        store.write("a", b"1")
    assert len(fs.errors) == 1


def test_file_that_is_missing_is_none() -> None:
    store, _ = watched_store()
    store.remove("none")
    store.write("a/there", b"1")
    assert store.read("none") is None
    assert store.read_all(["none", "a/there"]) == {"a/there": b"1"}
    assert (store.folders(), list(store.files())) == (["a"], ["a/there"])
    assert (store.below("none").folders(), store.below("none").files()) == ([], {})


def test_files_go_there_and_come_back(tmp_path: Path) -> None:
    store, _ = watched_store()
    (tmp_path / "here").write_bytes(b"12345")
    store.send("x/y", tmp_path / "here")
    store.fetch("x/y", tmp_path / "deep/copy")
    assert (tmp_path / "deep/copy").read_bytes() == b"12345"
    assert store.read_from("x/y", 3) == b"45"
    with pytest.raises(StoreError):
        store.fetch("x/none", tmp_path / "deep/none")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


@pytest.mark.parametrize(("text", "is_one"), [("s3://b/c", True), ("runs", False), ("/a//b", False), ("C:\\x", False)])
def test_address_is_known_by_its_scheme(text: str, is_one: bool) -> None:
    assert is_url(text) is is_one


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s5://b/c", "cannot use s5://b/c: Protocol not known: s5"),
        ("s3://", "give a bucket or a folder"),
    ],
)
def test_address_that_leads_nowhere_is_a_usage_error(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Store.open(url)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(
        UsageError, match=r"^cannot use s3://b/c: a package is not installed: pip install 'ddptrain\[s3\]'$"
    ):
        Store.open("s3://b/c")


def test_folder_of_files_is_a_store_as_well(tmp_path: Path) -> None:
    store = Store.open(f"file://{tmp_path}/deep/runs/")
    store.check()
    assert store.folders() == []
    store.write("a/b", b"1")
    assert (tmp_path / "deep/runs/a/b").read_bytes() == b"1"
    assert store.files()["a/b"].size_bytes == 1
