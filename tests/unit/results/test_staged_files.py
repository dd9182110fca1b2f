from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.protocol.events import FileSaved
from ddptrain.results import staged_files
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.errors import FileDamaged, ResultsError, UnsafePath
from ddptrain.results.run_writer import RunWriter
from tests.unit.results.conftest import Stage

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


@pytest.mark.parametrize("path", ["../run.json", "/tmp/x", "a/../../run.json", "", "a\0"])
def test_a_path_that_leaves_the_run_is_refused(writer: RunWriter, stage_file: StageFile, path: str) -> None:
    before = writer.layout.run_json.read_bytes()
    with pytest.raises(UnsafePath) as refused:
        writer.adopt_file(*stage_file(path, b"evil"))
    assert refused.value.exit_code == 1
    assert writer.layout.run_json.read_bytes() == before
    assert not os.listdir(writer.layout.artifacts_dir)


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


def parcels_in(folder: Path, *names: str) -> list[staged_files.StagedMove]:
    """Staged files with content "1", to be moved to new names in the same folder."""
    found = []
    for name in names:
        (folder / name).write_bytes(b"1")
        digest = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
        found.append(staged_files.StagedMove(folder / name, folder / f"{name}-new", 1, digest))
    return found


def test_staged_files_of_the_same_file_system_are_linked(tmp_path: Path) -> None:
    staged_files.move_in(parcels_in(tmp_path, "a", "b"), FileDamaged)
    assert [(tmp_path / name).stat().st_nlink for name in ("a", "a-new", "b", "b-new")] == [2, 2, 2, 2]


@pytest.mark.parametrize("is_linked", [True, False])
def test_no_other_user_may_write_whatever_the_umask_is(
    writer: RunWriter, stage: Stage, stage_file: StageFile, monkeypatch: pytest.MonkeyPatch, is_linked: bool
) -> None:
    monkeypatch.setattr(staged_files, "_on_one_file_system", lambda _: is_linked)
    before = os.umask(0)
    try:
        writer.adopt_file(*stage_file("samples/a.json", b"[]"))
        writer.adopt_checkpoint(0, *stage(10), CheckpointPolicy())
    finally:
        os.umask(before)
    modes = {path.relative_to(writer.layout.root): path.stat().st_mode for path in writer.layout.root.rglob("*")}
    assert {str(path) for path, mode in modes.items() if mode & 0o022} == set()
    assert modes[Path("checkpoints/step-10/state.pt")] & 0o777 == 0o644


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES])
def test_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", link)
    staged_files.move_in(parcels_in(tmp_path, "a", "b"), FileDamaged)
    assert [(tmp_path / f"{name}-new").read_bytes() for name in "ab"] == [b"1", b"1"]
    assert (tmp_path / "a").stat().st_nlink == 1


def test_staged_file_of_another_size_is_damaged(tmp_path: Path) -> None:
    (parcel,) = parcels_in(tmp_path, "a")
    (tmp_path / "a").write_bytes(b"123")
    with pytest.raises(FileDamaged, match=r"a is damaged: it has over 1 bytes, not the 1 announced$"):
        staged_files.move_in([parcel], FileDamaged)
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileDamaged, match=r"a is damaged: it has 0 bytes, not the 1 announced$"):
        staged_files.move_in([parcel], FileDamaged)
    assert not parcel.target.exists()


def test_hash_may_be_in_capitals_and_a_copy_never_replaces_a_file(tmp_path: Path) -> None:
    (parcel,) = parcels_in(tmp_path, "a")
    staged_files.move_in([dataclasses.replace(parcel, sha256=parcel.sha256.upper())], FileDamaged)
    with pytest.raises(ResultsError, match="File exists"):
        staged_files.move_in([parcel], FileDamaged)


def test_file_below_a_file_is_an_error(writer: RunWriter, stage_file: StageFile) -> None:
    writer.adopt_file(*stage_file("a", b"1"))
    with pytest.raises(ResultsError):
        writer.adopt_file(*stage_file("a/b", b"2"))
    writer.adopt_file(*stage_file("c/d", b"2"))
    with pytest.raises(ResultsError):
        writer.adopt_file(*stage_file("c", b"3"))
    assert (writer.layout.artifacts_dir / "a").read_bytes() == b"1"
