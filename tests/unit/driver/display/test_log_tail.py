"""A log file is followed from its start, whoever else has it open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddptrain.driver.display.line_assembler import RankLine
from ddptrain.driver.display.log_tail import READ_BYTES, LogTail


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_file_that_comes_later_is_read_from_its_start(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "rank-0.log")
    assert tail.read() == []
    append(tail.path, b"one\ntw")
    assert tail.read() == [RankLine("one")]
    append(tail.path, b"o\n")
    assert tail.read() == [RankLine("two")]
    assert tail.read() == []
    tail.close()


def test_one_read_takes_a_bounded_piece(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "rank-0.log")
    append(tail.path, b"x\n" * READ_BYTES)
    assert len(tail.read()) == READ_BYTES // 2
    assert tail.offset == READ_BYTES
    tail.close()


def test_nothing_is_read_beyond_the_end(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "rank-0.log")
    append(tail.path, b"one\ntwo\n")
    tail.end = 4
    assert tail.read() == [RankLine("one")]
    assert tail.read() == [] and tail.drained
    tail.close()


def test_reading_goes_on_after_the_file_was_given_back(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "rank-0.log")
    append(tail.path, b"one\n")
    tail.read()
    tail.close()
    append(tail.path, b"two\n")
    assert tail.read() == [RankLine("two")]
    tail.close()


def test_redrawn_line_is_due_once_an_interval_and_over_when_it_ends(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "rank-0.log")
    due = []
    for now_s in range(10):
        append(tail.path, b"\r%d%%" % now_s)
        tail.read()
        due.append(tail.redrawn(float(now_s), every_s=3.0))
    assert due == [None, None, None, "3%", None, None, "6%", None, None, "9%"]
    append(tail.path, b"\n")
    tail.read()
    assert [tail.redrawn(20.0, 3.0), tail.redrawn(21.0, 3.0)] == ["", None]
    tail.close()


def test_redrawn_line_that_does_not_change_is_told_once(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "rank-0.log")
    append(tail.path, b"\r5%")
    tail.read()
    assert [tail.redrawn(float(now_s), 1.0) for now_s in range(5)] == [None, "5%", None, None, None]
    tail.close()


def test_file_is_not_kept_open_if_there_are_too_many(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"one\n")
    tail = LogTail(path, keep_open=False)
    assert [line.text for line in tail.read()] == ["one"]
    assert tail._fd == -1
    append(path, b"two\n")
    assert [line.text for line in tail.read()] == ["two"]


def test_file_stays_open_and_is_opened_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    append(path, b"one\ntwo\n")
    tail = LogTail(path)
    tail.end = 4
    assert tail.read() == [RankLine("one")] and tail._fd >= 0
    tail.end = 8
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", lambda *_: os.close(-1))  # as a network file system that has dropped the handle
        assert tail.read() == [] and tail._fd == -1
    assert tail.read() == [RankLine("two")]
    tail.close()


def test_closed_tail_holds_no_file_open(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "rank-0.log")
    append(tail.path, b"one\n")
    tail.read()
    assert str(tail.path) in open_files()
    tail.close()
    assert str(tail.path) not in open_files()


def open_files() -> set[str]:
    """The files that this process holds open."""
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if link.is_symlink()}
