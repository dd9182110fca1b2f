"""logs/ddptrain.log of a run directory: appended to, bounded in size, and no danger to the run."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from ddptrain.log import Log
from ddptrain.results.errors import ResultsError
from ddptrain.results.log_file import LogFile, driver_log

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
