"""Uploaded code is verified, read-only, and deleted when it has not been used for long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddptrain.driver.transfer.code_package import CodePackage, pack
from ddptrain.errors import ClusterError
from ddptrain.worker.driver_calls import CodeCache


@pytest.fixture
def cache(tmp_path: Path) -> CodeCache:
    return CodeCache(tmp_path / "cache")


def package(folder: Path, text: str) -> CodePackage:
    (folder / "inside").mkdir(parents=True, exist_ok=True)
    (folder / "inside" / "train.py").write_text(text)
    return pack(folder, [])


def unpacked(cache: CodeCache, folder: Path, text: str) -> str:
    of = package(folder / "project", text)
    archive = folder / "archive"
    archive.write_bytes(of.archive[0])
    return cache.unpack(of.hash, archive, of.names)


def test_unpacked_code_is_found_and_read_only(cache: CodeCache, tmp_path: Path) -> None:
    of = package(tmp_path / "project", "print(1)")
    assert cache.use(of.hash) == ""
    home = unpacked(cache, tmp_path, "print(1)")
    assert cache.use(of.hash) == home == unpacked(cache, tmp_path, "print(1)")
    file = Path(home, "inside", "train.py")
    assert file.read_text() == "print(1)"
    assert not file.stat().st_mode & 0o222
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_code_with_another_hash_is_refused(cache: CodeCache, tmp_path: Path) -> None:
    of = package(tmp_path / "project", "print(1)")
    code = of.hash  # before the file is changed
    archive = tmp_path / "archive"
    archive.write_bytes(package(tmp_path / "project", "print(2)").archive[0])
    with pytest.raises(ClusterError, match="damaged: its hash is not"):
        cache.unpack(code, archive, of.names)
    archive.write_bytes(b"no archive")
    with pytest.raises(ClusterError, match="cannot unpack"):
        cache.unpack(code, archive, of.names)
    assert list(cache.folder.iterdir()) == []


def test_code_that_was_not_used_for_a_month_is_deleted(cache: CodeCache, tmp_path: Path) -> None:
    old, used = unpacked(cache, tmp_path, "1"), unpacked(cache, tmp_path, "2")
    for home in (old, used):
        os.utime(home, (1, 1))
    cache.use(Path(used).name)
    new = unpacked(cache, tmp_path, "3")
    assert [Path(home).is_dir() for home in (old, used, new)] == [False, True, True]


def test_cache_that_another_user_can_write_to_is_not_used(cache: CodeCache, tmp_path: Path) -> None:
    of = package(tmp_path / "project", "print(1)")
    unpacked(cache, tmp_path, "print(1)")
    cache.folder.chmod(0o770)
    with pytest.raises(ClusterError, match=r"must belong to user .* with mode 0700"):
        cache.use(of.hash)
    with pytest.raises(ClusterError, match="with mode 0700"):
        unpacked(cache, tmp_path, "print(2)")
