from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.results import secure_files
from ddptrain.results.errors import ResultsError
from ddptrain.results.metrics import MetricsReader
from ddptrain.results.secure_files import JsonLines, write_file

NOBODY = 65534


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write_file(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ResultsError, match=r"run\.json: No space left on device; free some space"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_lines_are_on_the_disk_when_append_returns(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"a": float("nan"), "b": "ä\ud800"})
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"a": None, "b": "ä\ud800"}
    lines.close()
    lines.close()


def test_a_line_that_the_disk_has_no_room_for_is_not_half_there(tmp_path: Path) -> None:
    # A limit on the size of files is as good as a full disk; in a process of its own, as it can't be raised
    # again.
    script = """
import resource, signal, sys
from pathlib import Path
from ddptrain.results.secure_files import JsonLines
from ddptrain.results.errors import ResultsError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLines(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
lines.append({"n": 1})
try:
    lines.append({"n": "x" * 200})
except ResultsError as error:
    print(error)
lines.append({"n": 2})
"""
    path = tmp_path / "a.jsonl"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert f"cannot write {path}: File too large" in done.stdout
    assert path.read_text() == '{"n":1}\n{"n":2}\n'
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


# --- What other users may have put there ---


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of ours that no attack may change, outside of the run directory."""
    path = tmp_path / "precious"
    path.write_text("precious\n")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


WRITERS: dict[str, Callable[[Path], object]] = {
    "append": lambda path: secure_files.append(path, b"line\n"),
    "open_to_append": lambda path: os.close(secure_files.open_to_append(path)),
    "lines": lambda path: secure_files.JsonLines(path).close(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_symbolic_link_is_not_written_through(write: Callable[[Path], object], folder: Path, precious: Path) -> None:
    path = folder / "file"
    for target in (precious, folder / "missing"):
        path.symlink_to(target)
        with pytest.raises(ResultsError, match=r"cannot write .*/file: "):
            write(path)
        path.unlink()
    assert precious.read_text() == "precious\n"
    assert os.listdir(folder) == []


def test_reading_follows_no_link_and_waits_for_no_fifo(folder: Path, precious: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(precious)
    with pytest.raises(OSError, match="not a regular file"):
        secure_files.read_bytes(folder / "fifo")
    with pytest.raises(OSError, match="symbolic links"):
        secure_files.read_bytes(folder / "link")
    assert secure_files.read_bytes(precious) == b"precious\n"


def test_what_is_made_is_for_us_alone_to_write_to_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secure_files.make_folder(tmp_path / "logs")
        write_file(tmp_path / "run.json", b"")
        secure_files.append(tmp_path / "rank-0.log", b"")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"logs": 0o755, "run.json": 0o644, "rank-0.log": 0o644}
    secure_files.make_folder(tmp_path / "logs")


def test_a_folder_may_be_behind_a_link_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "scratch")
    secure_files.make_folder(tmp_path / "logs")
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="File exists"):
        secure_files.make_folder(tmp_path / "file")


# --- Half a line ---


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"rank":0,"step":1,"loss":3.0}\n{"rank":0,"step":2,"lo')
    lines = JsonLines(path)
    for step in (2, 3):
        lines.append({"rank": 0, "step": step, "loss": 1.0})
    lines.close()
    assert [line.step for line in MetricsReader(path).read()] == [1, 2, 3]
    assert path.read_bytes().count(b"\n") == 4


def test_added_lines_are_written_together_by_flush_and_by_append(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    lines.add({"a": 1})
    lines.add({"a": float("inf")})
    assert path.read_text() == ""
    lines.flush()
    assert path.read_text() == '{"a":1}\n{"a":null}\n'
    lines.add({"a": 3})
    lines.append({"a": 4})
    assert path.read_text().splitlines()[2:] == ['{"a":3}', '{"a":4}']
    lines.add({"a": "x" * (1 << 16)})
    assert len(path.read_text().splitlines()) == 5  # so much does not wait
    lines.close()


def test_a_file_above_64_mib_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    assert len(secure_files.read_bytes(path)) == 64 << 20
    with path.open("ab") as file:
        file.write(b"1")
    with pytest.raises(OSError, match="File too large") as refused:
        secure_files.read_bytes(path)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(path))


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b'{"a":1}\n'), (b"{}\n", b'{}\n{"a":1}\n'), (b"{", b'{\n{"a":1}\n'), (b"\n", b'\n{"a":1}\n')],
)
def test_only_half_a_line_is_ended_first(tmp_path: Path, before: bytes, after: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(before)
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"a": 1})
    lines.close()
    assert (tmp_path / "a.jsonl").read_bytes() == after


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    assert not secure_files.is_own_folder(tmp_path / "theirs")
    with pytest.raises(ResultsError, match="the folder belongs to another user"):
        secure_files.make_folder(tmp_path / "theirs")


def test_owner_may_be_another_one_where_the_file_system_gives_everything_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)  # what is created has another owner than this process
    secure_files.make_folder(tmp_path / "logs")
    assert secure_files.is_own_folder(tmp_path / "logs")
