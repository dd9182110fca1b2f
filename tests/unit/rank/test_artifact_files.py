"""Files are staged under new names and announced with size and hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ddptrain.protocol import events
from ddptrain.rank.output import ArtifactFiles, Emitter, stays_below
from tests.unit.specs import make_spec


@pytest.mark.parametrize("path", ["a.txt", "a/b.txt", "a/..b"])
def test_path_below_the_folder_is_accepted(path: str) -> None:
    assert stays_below(path)


@pytest.mark.parametrize("path", ["", ".", "/a", "..", "../a", "a/../b", "a/.."])
def test_path_that_may_leave_the_folder_is_refused(path: str) -> None:
    assert not stays_below(path)


def test_file_is_lent_before_it_is_announced(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    files = ArtifactFiles(make_spec(staging=str(tmp_path)), Emitter(fd))
    lent: list[tuple[bytes, bytes]] = []
    files.save("a/b.txt", b"12345", lambda path: lent.append((path.read_bytes(), (tmp_path / "events").read_bytes())))
    files.save("c.txt", "6")
    os.close(fd)
    first, second = (events.decode(line) for line in (tmp_path / "events").read_bytes().splitlines())
    assert lent == [(b"12345", b"")]
    assert isinstance(first, events.FileSaved) and isinstance(second, events.FileSaved)
    assert (first.path, first.staging, first.size_bytes, first.area) == ("a/b.txt", "file-0", 5, "artifacts")
    assert first.sha256 == hashlib.sha256(b"12345").hexdigest()
    assert (second.path, second.staging, (tmp_path / "file-1").read_text()) == ("c.txt", "file-1", "6")
