"""Files of a run: secure, staged, and logs."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.log import Log
from ddptrain.protocol.events import FileSaved
from ddptrain.results import secure_files, staged_files
from ddptrain.results.checkpoints.retention import CheckpointPolicy
from ddptrain.results.errors import FileDamaged, ResultsError, UnsafePath
from ddptrain.results.log_file import LogFile, driver_log
from ddptrain.results.metrics import MetricsReader
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.secure_files import JsonLines, write_file
from tests.unit.results.conftest import Stage

# --- staged files ---


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


# --- logs/ddptrain.log of a run directory: appended to, bounded in size, and no danger to the run ---


LOG = Log("ddptrain.driver.test")


def words_of(path: Path) -> list[str]:
    """The lines without their time."""
    return [line.partition(" ")[2] for line in path.read_text().splitlines()]


def test_file_has_level_info_of_this_run_and_nothing_after_it(tmp_path: Path) -> None:
    path = tmp_path / "ddptrain.log"
    with driver_log(path, "toy-1", ["hunter22"]):
        LOG.info("decided", why="hunter22")
        LOG.debug("detail")
    LOG.info("later")
    first, second = words_of(path)
    assert first.startswith("INFO driver run=toy-1 driver started version=")
    assert f"pid={os.getpid()}" in first
    assert second == 'INFO driver run=toy-1 decided why="<left out>"'
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


def test_error_that_ends_the_driver_is_the_last_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), driver_log(tmp_path / "ddptrain.log", "toy-1", []):
        raise ValueError("no\nway")
    assert words_of(tmp_path / "ddptrain.log")[-1] == r'INFO driver run=toy-1 driver ends error="ValueError: no\\nway"'


def test_second_driver_appends_and_ends_half_a_line_first(tmp_path: Path) -> None:
    path = tmp_path / "ddptrain.log"
    path.write_text("of the driver before\nhalf a li")
    with driver_log(path, "toy-1", []):
        pass
    lines = path.read_text().splitlines()
    assert lines[:2] == ["of the driver before", "half a li"] and "driver started" in lines[2]


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "ddptrain.driver", "levelname": "INFO", "msg": text, "created": 0.0})


def test_size_is_bounded_by_one_older_file(tmp_path: Path) -> None:
    path = tmp_path / "ddptrain.log"
    size = len("1970-01-01T00:00:00.000Z INFO driver 0\n")
    handler = LogFile(path, max_bytes=3 * size)
    for number in range(8):
        handler.emit(record(str(number)))
    handler.close()
    assert [line[-1] for line in path.read_text().splitlines()] == ["6", "7"]
    assert [line[-1] for line in (tmp_path / "ddptrain.log.1").read_text().splitlines()] == ["3", "4", "5"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ddptrain.log", "ddptrain.log.1"]


def test_link_that_another_user_has_planted_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "ddptrain.log").symlink_to(tmp_path / "precious")
    with pytest.raises(ResultsError, match="symbolic link"), driver_log(tmp_path / "ddptrain.log", "toy-1", []):
        pass
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with driver_log(tmp_path / "ddptrain.log", "toy-1", []):
        monkeypatch.setattr("ddptrain.file_ops.write_all", full)
        LOG.info("lost")
        monkeypatch.undo()
        LOG.info("also lost: half a line may stand before it")
    assert len(words_of(tmp_path / "ddptrain.log")) == 1


def test_log_of_one_of_several_runs_has_its_own_records_only(tmp_path: Path) -> None:
    def lines(only_own: bool) -> int:
        path = tmp_path / f"{only_own}.log"
        with driver_log(path, "toy-1", [], only_own=only_own):
            LOG.info("own")
            logging.getLogger("ddptrain.driver.test").info("of another run")
        return len(words_of(path))

    assert (lines(True), lines(False)) == (2, 3)


# --- secure files ---


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
