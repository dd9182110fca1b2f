"""The stream never raises and never blocks for good."""

from __future__ import annotations

import fcntl
import io
import os
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from ddptrain.driver.display.output_stream import Stream


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        yield reader, file
    try:
        os.close(reader)
    except OSError:
        pass  # the test has closed it


def read_all(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(fd, 65536)
    return data


@pytest.mark.parametrize("blocking", [True, False])
def test_everything_arrives_through_a_pipe_that_takes_little_at_once(pipe: tuple[int, TextIO], blocking: bool) -> None:
    reader, file = pipe
    os.set_blocking(file.fileno(), blocking)
    text = "Zoë\n" * 100_000
    thread = threading.Thread(target=Stream(file).write, args=[text])
    thread.start()
    assert read_all(reader, len(text.encode())).decode() == text
    thread.join()


def test_reader_who_has_gone_is_noted_and_later_writes_go_nowhere(pipe: tuple[int, TextIO]) -> None:
    reader, file = pipe
    stream = Stream(file)
    os.close(reader)
    stream.write("one")
    assert stream.broken == "Broken pipe"
    stream.write("two")
    file.write("three")
    file.flush()  # to /dev/null: nobody who prints later fails, nor does the interpreter at its end


def test_writing_to_a_stuck_reader_ends_when_told_to_give_up(pipe: tuple[int, TextIO]) -> None:
    _, file = pipe
    give_up = threading.Event()
    stream = Stream(file, give_up.is_set)
    thread = threading.Thread(target=stream.write, args=["x" * 1_000_000])
    thread.start()
    give_up.set()
    thread.join(60)
    assert not thread.is_alive() and not stream.broken


def test_writing_within_a_time_ends_in_time(pipe: tuple[int, TextIO]) -> None:
    _, file = pipe
    started_s = time.monotonic()
    Stream(file).write_within("x" * 1_000_000, 0.05)
    assert time.monotonic() - started_s < 30


def test_what_has_room_is_written_also_when_the_time_is_over_at_once(pipe: tuple[int, TextIO]) -> None:
    reader, file = pipe
    Stream(file).write_within("last word", -1.0)
    assert os.read(reader, 100) == b"last word"


def test_full_disk_is_noted() -> None:
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as file:
        stream = Stream(file)
        stream.write("text")
        assert stream.broken == "No space left on device"


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"Zo? ?\n"), ("utf-8", "Zoë ?\n".encode())])
def test_characters_that_cannot_be_shown_are_replaced(pipe: tuple[int, TextIO], encoding: str, shown: bytes) -> None:
    reader, file = pipe
    with os.fdopen(os.dup(file.fileno()), "w", encoding=encoding) as limited:
        Stream(limited).write("Zoë \ud800\n")
    assert os.read(reader, 100) == shown


def test_stream_without_a_descriptor_is_written_to() -> None:
    file = io.StringIO()
    Stream(file).write("Zoë\n")
    assert file.getvalue() == "Zoë\n"


def test_what_the_file_had_buffered_comes_first(pipe: tuple[int, TextIO]) -> None:
    reader, file = pipe
    file.write("before ")
    Stream(file).write("after")
    assert os.read(reader, 100) == b"before after"


def test_closed_stdout_is_broken_from_the_start() -> None:
    stream = Stream(None)
    stream.write("text")
    assert stream.broken


def test_reader_slower_than_the_writer_gets_everything(pipe: tuple[int, TextIO]) -> None:
    reader, file = pipe
    fcntl.fcntl(file.fileno(), 1031, 4096)  # F_SETPIPE_SZ: the smallest pipe there is
    thread = threading.Thread(target=Stream(file).write, args=["x" * 50_000])
    thread.start()
    assert len(read_all(reader, 50_000)) == 50_000
    thread.join()
