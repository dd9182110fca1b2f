"""The installed schedules: written, read back, damaged, and locked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ddptrain.errors import ClusterError, UsageError
from ddptrain.schedule.entries import Entries, Entry

ENTRY = Entry(
    name="petnames",
    model="petnames",
    config="/home/me/nightly.yaml",
    workdir="/home/me",
    at="Mon 03:00",
    zone="Europe/Berlin",
    target="cron",
    added_at="2026-11-22T12:00:00.000Z",
    jitter_s=60,
    files=("/home/me/petnames.sh",),
)


def test_schedule_is_read_back(tmp_path: Path) -> None:
    entries = Entries(tmp_path / "schedules")
    assert entries.all() == []
    other = dataclasses.replace(ENTRY, name="dogs")
    entries.save(ENTRY)
    entries.save(other)
    assert entries.all() == [other, ENTRY]
    assert entries.find("petnames") == ENTRY
    assert (entries.folder / "petnames.json").stat().st_mode & 0o777 == 0o600
    entries.delete("petnames")
    assert entries.all() == [other]


def test_unknown_name_has_a_hint(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    with pytest.raises(UsageError, match="there is no schedule petname: none is installed"):
        entries.find("petname")
    entries.save(ENTRY)
    with pytest.raises(UsageError, match=r"there is no schedule petname: did you mean petnames\?"):
        entries.find("petname")


def test_fields_of_newer_versions_are_ignored(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    (tmp_path / "petnames.json").write_text(json.dumps({**dataclasses.asdict(ENTRY), "colour": "blue"}))
    assert entries.all() == [ENTRY]


@pytest.mark.parametrize(
    "change",
    [{"at": "never"}, {"zone": "Nowhere"}, {"added_at": "today"}, {"added_at": ""}, {"jitter_s": "1"}, {"name": None}],
)
def test_damaged_file_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "petnames.json").write_text(json.dumps({**dataclasses.asdict(ENTRY), **change}))
    with pytest.raises(UsageError, match=r"petnames.json is damaged"):
        Entries(tmp_path).all()


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_file_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "petnames.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"petnames.json is damaged"):
        Entries(tmp_path).all()


def test_lock_is_held_by_one(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    with entries.locked("check", wait=False) as first, entries.locked("check", wait=False) as second:
        assert (first, second) == (True, False)
    with entries.locked("check", wait=False) as again:
        assert again


def test_folder_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match=r"cannot use the folder .*set XDG_STATE_HOME to another"):
        Entries(tmp_path / "file" / "schedules").save(ENTRY)
