"""The listing of a source in a child process: the same images, the same errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.storage.store import Location, StoreError
from ddptrain.workloads.images.data.listing_process import list_by_class, list_in_process, main


def test_child_process_finds_the_same_images(tmp_path: Path) -> None:
    for key in ("b/2.jpg", "a/1.png", "a/notes.txt"):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(b"12345")
    here = list_by_class(Location(str(tmp_path)))
    assert {name: [(key, size) for key, size, _ in images] for name, images in here.items()} == {
        "a": [("a/1.png", 5)],
        "b": [("b/2.jpg", 5)],
    }
    found = list_in_process(Location(str(tmp_path)))
    assert {name: [tuple(image) for image in images] for name, images in found.items()} == here


def test_errors_come_back_with_their_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is nothing in"):
        list_in_process(Location(str(tmp_path)))
    with pytest.raises(UsageError, match="missing does not exist"):
        list_in_process(Location(str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("status", "reply", "message"), [(0, b'"the store is away"', "the store is away"), (1, b"", "can't be listed: see")]
)
def test_store_that_is_away_and_a_crash_are_errors_of_the_store(
    monkeypatch: pytest.MonkeyPatch, status: int, reply: bytes, message: str
) -> None:
    done = subprocess.CompletedProcess([], status, reply)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(StoreError, match=message):
        list_in_process(Location("s3://bucket"))


def test_replies_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(tmp_path), {})
    assert capsys.readouterr().out.startswith('["there is nothing in ')
