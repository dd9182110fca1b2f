from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.protocol.events import FileSaved
from ddptrain.results import staged_files
from ddptrain.results.errors import FileDamaged, ResultsError, UnsafePath
from ddptrain.results.run_writer import RunWriter

StageFile = Callable[[str, bytes], tuple[FileSaved, Path]]


def test_a_file_comes_home_below_artifacts(writer: RunWriter, stage_file: StageFile) -> None:
    event, source = stage_file("samples/epoch 3.json", b"[]")
    home = writer.adopt_file(event, source)
    assert home == writer.layout.artifacts_dir / "samples" / "epoch 3.json"
    assert home.read_bytes() == b"[]"
    assert not source.exists()


def test_a_trackers_file_comes_home_below_tracking_and_no_other_folder_is_open(
    writer: RunWriter, stage_file: StageFile
) -> None:
    event, source = stage_file("wandb/run-1/files/a.json", b"[]")
    with pytest.raises(UnsafePath, match='asked for a file in "checkpoints"'):
        writer.adopt_file(dataclasses.replace(event, area="checkpoints"), source)
    home = writer.adopt_file(dataclasses.replace(event, area="tracking"), source)
    assert home == writer.layout.root / "tracking/wandb/run-1/files/a.json"
    assert writer.layout.artifacts() == {}


def test_a_file_of_the_same_name_is_replaced(writer: RunWriter, stage_file: StageFile) -> None:
    writer.adopt_file(*stage_file("a", b"1"))
    home = writer.adopt_file(*stage_file("a", b"22"))
    assert home.read_bytes() == b"22"
    assert writer.layout.artifacts() == {"a": 2}


@pytest.mark.parametrize("path", ["../run.json", "/tmp/x", "a/../../run.json", "", "C:\\x", "a\0"])
def test_a_path_that_leaves_the_run_is_refused(writer: RunWriter, stage_file: StageFile, path: str) -> None:
    before = writer.layout.run_json.read_bytes()
    with pytest.raises(UnsafePath) as refused:
        writer.adopt_file(*stage_file(path, b"evil"))
    assert refused.value.exit_code == 1
    assert writer.layout.run_json.read_bytes() == before
    assert not os.listdir(writer.layout.artifacts_dir)


def test_links_inside_artifacts_are_not_followed(writer: RunWriter, stage_file: StageFile, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (writer.layout.artifacts_dir / "door").symlink_to(outside)
    with pytest.raises(UnsafePath, match="symbolic link"):
        writer.adopt_file(*stage_file("door/x", b"evil"))
    (outside / "victim").write_text("mine")
    (writer.layout.artifacts_dir / "link").symlink_to(outside / "victim")
    home = writer.adopt_file(*stage_file("link", b"data"))
    assert not home.is_symlink() and home.read_bytes() == b"data"
    assert (outside / "victim").read_text() == "mine"
    assert os.listdir(outside) == ["victim"]


def test_a_file_where_a_folder_is_and_below_a_file_is_refused(writer: RunWriter, stage_file: StageFile) -> None:
    writer.adopt_file(*stage_file("a/b", b"1"))
    with pytest.raises(UnsafePath, match="is a folder"):
        writer.adopt_file(*stage_file("a", b"1"))
    with pytest.raises(UnsafePath, match="that is a file"):
        writer.adopt_file(*stage_file("a/b/c", b"1"))


def test_a_damaged_file_changes_nothing(writer: RunWriter, stage_file: StageFile) -> None:
    writer.adopt_file(*stage_file("a", b"good"))
    event, source = stage_file("a", b"evil")
    with pytest.raises(FileDamaged, match="SHA-256"):
        writer.adopt_file(dataclasses.replace(event, sha256="0" * 64), source)
    assert (writer.layout.artifacts_dir / "a").read_bytes() == b"good"
    assert os.listdir(writer.layout.artifacts_dir) == ["a"]


def test_a_staged_link_is_not_followed(writer: RunWriter, stage_file: StageFile, tmp_path: Path) -> None:
    event, source = stage_file("a", b"data")
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(FileDamaged, match="symbolic link"):
        writer.adopt_file(event, link)


def test_file_that_cant_be_put_in_its_place_leaves_nothing(
    writer: RunWriter, stage_file: StageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(*_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    event, source = stage_file("a", b"1")
    monkeypatch.setattr(staged_files, "publish", publish)
    with pytest.raises(ResultsError, match="Permission denied"):
        writer.adopt_file(event, source)
    assert [*writer.layout.artifacts_dir.iterdir()] == [] and source.exists()
