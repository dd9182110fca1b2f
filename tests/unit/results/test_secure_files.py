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
from ddptrain.results.ownership import run_lock
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
    "open_to_lock": lambda path: os.close(secure_files.open_to_lock(path)),
    "lock": lambda path: os.close(run_lock.take(path)),
    "lines": lambda path: secure_files.JsonLines(path).close(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_symbolic_link_is_not_written_through(write: Callable[[Path], object], folder: Path, precious: Path) -> None:
    path = folder / "file"
    for target in (precious, folder / "missing"):
        path.symlink_to(target)
        with pytest.raises(ResultsError, match=r"cannot write .*/file: it is a symbolic link"):
            write(path)
        path.unlink()
    assert precious.read_text() == "precious\n"
    assert os.listdir(folder) == []


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_fifo_keeps_no_writer_waiting(write: Callable[[Path], object], folder: Path) -> None:
    os.mkfifo(folder / "file")
    with pytest.raises(ResultsError, match=r"cannot write .*/file: it is not a regular file"):
        write(folder / "file")
    reader = os.open(folder / "file", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(ResultsError, match="not a regular file"):
            write(folder / "file")
    finally:
        os.close(reader)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_second_name_of_a_file_is_written_to_only_where_nobody_else_could_have_made_it(
    write: Callable[[Path], object], folder: Path, precious: Path
) -> None:
    precious.write_text("")
    os.link(precious, folder / "file")
    write(folder / "file")  # as a backup by hard links leaves it
    precious.write_text("precious\n")
    folder.chmod(0o777)
    with pytest.raises(ResultsError, match="it has 2 names"):
        write(folder / "file")
    assert precious.read_text() == "precious\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_file_of_another_user_is_not_written_to(write: Callable[[Path], object], folder: Path) -> None:
    (folder / "file").write_text("theirs\n")
    os.chown(folder / "file", NOBODY, NOBODY)
    with pytest.raises(ResultsError, match=r"it belongs to another user"):
        write(folder / "file")
    assert (folder / "file").read_text() == "theirs\n"
    assert os.listdir(folder) == ["file"]


def test_a_lock_does_not_erase_what_is_no_lock(folder: Path) -> None:
    (folder / "run.lock").write_text("the thesis\n")
    with pytest.raises(ResultsError, match=r"run\.lock: it is not a lock file"):
        run_lock.take(folder / "run.lock")
    assert (folder / "run.lock").read_text() == "the thesis\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_open_a_lock(folder: Path) -> None:
    path = folder / "run.lock"
    path.touch(0o644)  # as older versions created it
    descriptor = run_lock.take(path)
    try:
        for parent in (folder, folder.parent):
            parent.chmod(0o755)
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == 0o600
        there = os.open(folder, os.O_RDONLY)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(PermissionError):
                os.open("run.lock", os.O_RDONLY, dir_fd=there)
        finally:
            os.seteuid(0)
            os.close(there)
    finally:
        os.close(descriptor)


def test_reading_follows_no_link_and_waits_for_no_fifo(folder: Path, precious: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(precious)
    with pytest.raises(OSError, match="not a regular file"):
        secure_files.read_bytes(folder / "fifo")
    with pytest.raises(OSError, match="symbolic links"):
        secure_files.read_bytes(folder / "link")
    assert secure_files.read_bytes(precious) == b"precious\n"
    assert run_lock.is_held(folder / "fifo") is False


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_folder_or_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    (tmp_path / "theirs").mkdir(mode=0o777)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    for name, kind in (("link", "symbolic link"), ("theirs", "folder")):
        assert not secure_files.is_own_folder(tmp_path / name)
        with pytest.raises(ResultsError, match=f"the {kind} belongs to another user"):
            secure_files.make_folder(tmp_path / name)
    assert os.listdir(tmp_path / "theirs") == []


def test_owners_may_be_others_where_the_file_system_gives_everything_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)  # what is created has another owner than this process
    secure_files.make_folder(tmp_path / "logs")
    secure_files.append(tmp_path / "logs/a", b"1")
    secure_files.append(tmp_path / "logs/a", b"2")
    assert (tmp_path / "logs/a").read_bytes() == b"12"
    assert os.listdir(tmp_path / "logs") == ["a"]


def test_a_folder_that_is_exchanged_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    identity = secure_files.FolderIdentity.of(tmp_path / "run")
    identity.check()
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(ResultsError, match="No such file"):
        identity.check()
    (tmp_path / "run").mkdir()
    with pytest.raises(ResultsError, match="another process has put a different folder there"):
        identity.check()


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


def test_a_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"rank":0,"step":1,"loss":3.0}')
    lines = JsonLines(path)
    lines.append({"rank": 0, "step": 2, "loss": 1.0})
    lines.close()
    assert [line.step for line in MetricsReader(path).read()] == [1, 2]


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


def test_closing_lines_frees_the_descriptor_and_leaves_what_waits(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"a": 1})
    lines.add({"b": 2})
    descriptor = lines._descriptor
    lines.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    lines.close()
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"a":1}\n' and lines.size_bytes == 8


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


def test_so_many_bytes_of_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    lines.add({"a": "x" * ((1 << 16) - 9)})  # with the rest of the line 65,536 bytes
    assert path.stat().st_size == 0 and lines.size_bytes == 0
    lines.add({})
    assert path.stat().st_size == lines.size_bytes == 65_539
    lines.close()


def test_whose_a_foreign_file_is_stands_in_the_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = os.stat(folder)
    monkeypatch.setattr(secure_files, "_is_our_id", lambda uid, folder: False)
    assert secure_files._problem(state, folder) == f"it belongs to another user ({secure_files._user(state.st_uid)})"
    assert secure_files._user(0) == "root" and secure_files._user(123_456_789) == "user id 123456789"


def test_lock_file_of_an_older_version_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.touch(mode=0o644)
    path.chmod(0o644)
    os.close(secure_files.open_to_lock(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


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
