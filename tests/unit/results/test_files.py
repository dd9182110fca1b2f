"""Files of a run: secure, staged, and logs."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.log import Log
from ddptrain.protocol.events import FileSaved
from ddptrain.results import secure_files
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.errors import ResultsError, UnsafePath
from ddptrain.results.log_file import driver_log
from ddptrain.results.metrics import MetricsReader
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.secure_files import JsonLines
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


@pytest.mark.parametrize("path", ["../run.json", "/tmp/x", "a/../../run.json", "", "a\0"])
def test_a_path_that_leaves_the_run_is_refused(writer: RunWriter, stage_file: StageFile, path: str) -> None:
    before = writer.layout.run_json.read_bytes()
    with pytest.raises(UnsafePath) as refused:
        writer.adopt_file(*stage_file(path, b"evil"))
    assert refused.value.exit_code == 1
    assert writer.layout.run_json.read_bytes() == before
    assert not os.listdir(writer.layout.artifacts_dir)


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize("is_linked", [True, False])
def test_no_other_user_may_write_whatever_the_umask_is(
    writer: RunWriter, stage: Stage, stage_file: StageFile, monkeypatch: pytest.MonkeyPatch, is_linked: bool
) -> None:
    if not is_linked:
        monkeypatch.setattr(os, "link", no_links)
    before = os.umask(0)
    try:
        writer.adopt_file(*stage_file("samples/a.json", b"[]"))
        writer.adopt_checkpoint(0, *stage(10), CheckpointPolicy())
    finally:
        os.umask(before)
    modes = {path.relative_to(writer.layout.root): path.stat().st_mode for path in writer.layout.root.rglob("*")}
    assert {str(path) for path, mode in modes.items() if mode & 0o022} == set()
    assert modes[Path("checkpoints/step-10/state.pt")] & 0o777 == 0o644


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


def test_link_that_another_user_has_planted_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "ddptrain.log").symlink_to(tmp_path / "precious")
    with pytest.raises(ResultsError, match="symbolic link"), driver_log(tmp_path / "ddptrain.log", "toy-1", []):
        pass
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_full_disk_ends_the_log_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "ddptrain.log"
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with driver_log(path, "toy-1", []):
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
            LOG.info("lost")
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            LOG.info("also lost: half a line may stand before it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(words_of(path)) == 1


def test_line_that_a_killed_driver_has_left_incomplete_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "ddptrain.log"
    path.write_text("2026-01-01T00:00:00.000Z INFO driver cut o")
    with driver_log(path, "toy-1", []):
        pass
    assert [line.split()[0] for line in words_of(path)] == ["INFO", "INFO"]


def test_log_of_one_of_several_runs_has_its_own_records_only(tmp_path: Path) -> None:
    def lines(only_own: bool) -> int:
        path = tmp_path / f"{only_own}.log"
        with driver_log(path, "toy-1", [], only_own=only_own):
            LOG.info("own")
            logging.getLogger("ddptrain.other").info("of another run")
        return len(words_of(path))

    assert (lines(True), lines(False)) == (2, 3)


# --- secure files ---


NOBODY = 65534


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    assert not secure_files.is_own_folder(tmp_path / "theirs")
    with pytest.raises(ResultsError, match="the folder belongs to another user"):
        secure_files.make_folder(tmp_path / "theirs")
