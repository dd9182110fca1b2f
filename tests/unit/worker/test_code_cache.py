"""Uploaded code is verified, read-only, locked while it is used, and deleted when the cache is full."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.driver.transfer.code_package import CodePackage, pack
from ddptrain.errors import ClusterError
from ddptrain.worker import code_cache
from ddptrain.worker.code_cache import CodeCache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CodeCache]:
    yield CodeCache(tmp_path / "cache", limit_bytes=5_000)
    for run in ("one", "two", "three"):
        code_cache.release(run)


def package(folder: Path, text: str) -> CodePackage:
    (folder / "inside").mkdir(parents=True, exist_ok=True)
    (folder / "inside" / "train.py").write_text(text)
    return pack(folder, [])


def unpacked(cache: CodeCache, folder: Path, run: str, text: str) -> str:
    of = package(folder / "project", text)
    archive = folder / "archive"
    archive.write_bytes(of.archive[0])
    return cache.unpack(run, of.hash, archive, of.names)


def test_unpacked_code_is_found_and_read_only(cache: CodeCache, tmp_path: Path) -> None:
    of = package(tmp_path / "project", "print(1)")
    assert cache.use("one", of.hash) == ""
    home = unpacked(cache, tmp_path, "one", "print(1)")
    assert cache.use("two", of.hash) == home
    file = Path(home, "inside", "train.py")
    assert file.read_text() == "print(1)"
    assert not file.stat().st_mode & 0o222


def test_code_with_another_hash_is_refused(cache: CodeCache, tmp_path: Path) -> None:
    of = package(tmp_path / "project", "print(1)")
    assert len(of.hash) == 64
    archive = tmp_path / "archive"
    archive.write_bytes(package(tmp_path / "project", "print(2)").archive[0])
    with pytest.raises(ClusterError, match="damaged: its hash is not"):
        cache.unpack("one", of.hash, archive, of.names)
    archive.write_bytes(b"no archive")
    with pytest.raises(ClusterError, match="cannot unpack"):
        cache.unpack("one", of.hash, archive, of.names)
    assert list(cache.folder.iterdir()) == []


def test_least_recently_used_code_is_deleted_unless_it_is_in_use(cache: CodeCache, tmp_path: Path) -> None:
    first = unpacked(cache, tmp_path, "one", "1" * 3_000)
    second = unpacked(cache, tmp_path, "two", "2" * 3_000)
    assert Path(first).is_dir()  # over the limit, but in use
    for home in (first, second):
        os.utime(home, (1, 1))
    code_cache.release("two")
    third = unpacked(cache, tmp_path, "three", "3" * 3_000)
    assert [Path(home).is_dir() for home in (first, second, third)] == [True, False, True]


def test_modified_code_is_not_used_again(cache: CodeCache, tmp_path: Path) -> None:
    home = unpacked(cache, tmp_path, "one", "print(1)")
    code = Path(home).name
    file = Path(home, "inside", "train.py")
    file.chmod(0o600)
    file.write_text("print(2)")
    assert cache.use("two", code) == "", "another run holds it"
    assert file.exists()
    assert cache.use("one", code) == "" and not file.exists()
    assert Path(unpacked(cache, tmp_path, "one", "print(1)"), "inside", "train.py").read_text() == "print(1)"


def test_folder_in_the_way_is_named(cache: CodeCache, tmp_path: Path) -> None:
    of = package(tmp_path / "project", "print(1)")
    cache.folder.mkdir(mode=0o700)
    (cache.folder / of.hash).mkdir()
    with (cache.folder / f"{of.hash}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        (cache.folder / of.hash / "file").touch()
        with pytest.raises(ClusterError, match="is where the uploaded code must be written: delete it"):
            unpacked(cache, tmp_path, "one", "print(1)")


def test_cache_that_another_user_can_write_to_is_not_used(cache: CodeCache, tmp_path: Path) -> None:
    """They could write a folder with the record of a verified one."""
    of = package(tmp_path / "project", "print(1)")
    unpacked(cache, tmp_path, "one", "print(1)")
    cache.folder.chmod(0o770)
    with pytest.raises(ClusterError, match=r"must belong to user .* with mode 0700"):
        cache.use("two", of.hash)
    with pytest.raises(ClusterError, match="with mode 0700"):
        unpacked(cache, tmp_path, "two", "print(2)")


def test_cache_is_private_and_leftovers_of_a_killed_worker_are_deleted(cache: CodeCache, tmp_path: Path) -> None:
    left, fresh = cache.folder / ".incoming-dead", cache.folder / ".incoming-new"
    unpacked(cache, tmp_path, "one", "1")
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    for folder in (left, fresh):
        folder.mkdir()
    os.utime(left, (1, 1))
    unpacked(cache, tmp_path, "two", "2")
    assert not left.exists() and fresh.exists()
