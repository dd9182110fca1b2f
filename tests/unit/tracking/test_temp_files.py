"""Files that trackers share: they outlive the original, and are deleted after the last reader."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddptrain.tracking.items import SharedFiles, TempFolder, link_or_copy


def test_files_are_deleted_by_the_last_reader_only(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_bytes(b"x")
    folder.mkdir()
    (folder / "inside").write_bytes(b"y")
    files = SharedFiles([file, folder, tmp_path / "gone"], readers=2)
    files.release()
    assert file.exists() and folder.exists()
    files.release()
    assert not file.exists() and not folder.exists()


def test_added_file_keeps_its_content_and_has_its_suffix_or_another(tmp_path: Path) -> None:
    original = tmp_path / "image-1.tmp"
    original.write_bytes(b"pixels")
    temp = TempFolder(tmp_path / "temp")
    same, other = temp.add(original), temp.add(original, ".png")
    assert (same.name, other.name) == ("0.tmp", "1.png")
    assert other.stat().st_ino == original.stat().st_ino, "a hard link costs nothing"
    original.unlink()
    assert same.read_bytes() == other.read_bytes() == b"pixels"
    temp.delete()
    assert not (tmp_path / "temp").exists()


def test_added_folder_has_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "model").write_bytes(b"weights")
    added = TempFolder(tmp_path / "temp").add(tmp_path / "step-1")
    assert [(path.name, path.read_bytes()) for path in added.iterdir()] == [("model", b"weights")]


def test_file_system_without_hard_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"x")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"x"
    assert (tmp_path / "b").stat().st_ino != (tmp_path / "a").stat().st_ino


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TempFolder(tmp_path / "temp").add(tmp_path / "missing")
