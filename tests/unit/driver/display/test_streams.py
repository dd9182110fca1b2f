"""Output streams, terminals, and the logs of ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from ddptrain.driver.display.terminal import (
    Stream,
    choose_mode,
    format_own,
    harmless,
    wants_colour,
    wrapped,
)

# --- The stream never raises and never blocks for good ---


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


def test_what_the_file_had_buffered_comes_first(pipe: tuple[int, TextIO]) -> None:
    reader, file = pipe
    file.write("before ")
    Stream(file).write("after")
    assert os.read(reader, 100) == b"before after"


# --- Which output fits, when there are colours, and what may not reach a terminal ---


@pytest.mark.parametrize(
    ("mode", "is_terminal", "environ", "chosen"),
    [
        ("auto", True, {"TERM": "xterm"}, "live"),
        ("auto", True, {"TERM": "xterm", "CI": ""}, "live"),
        ("auto", True, {"TERM": "xterm", "CI": "false"}, "live"),
        ("auto", True, {"TERM": "xterm", "CI": "true"}, "plain"),
        ("auto", True, {"TERM": "xterm", "CI": "woodpecker"}, "plain"),
        ("auto", True, {"TERM": "dumb"}, "plain"),
        ("auto", False, {"TERM": "xterm"}, "plain"),
        ("live", False, {}, "plain"),
        ("live", True, {"CI": "1"}, "live"),
        ("plain", True, {}, "plain"),
        ("json", True, {}, "json"),
    ],
)
def test_output_fits_where_it_goes(mode: str, is_terminal: bool, environ: dict[str, str], chosen: str) -> None:
    assert choose_mode(mode, is_terminal, environ) == chosen


@pytest.mark.parametrize(
    ("is_terminal", "environ", "wanted"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (True, {"FORCE_COLOR": "0"}, False),
    ],
)
def test_colours_are_for_those_who_want_them(is_terminal: bool, environ: dict[str, str], wanted: bool) -> None:
    assert wants_colour(is_terminal, environ) is wanted


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("a\x1b[2J\x1b[1;1H\x1b[?25lb", "ab"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        ("a\x00\x07\x08\x0b\x0c\x7f\x9bb", "ab"),
        ("unfinished \x1b[3", "unfinished "),
    ],
)
def test_only_colours_reach_a_terminal(printed: str, shown: str) -> None:
    assert harmless(printed, colour=True) == shown


def test_our_own_lines_may_quote_others_and_are_made_safe_in_a_pipe_too() -> None:
    assert format_own(["run x failed on host\x1b[2J\x1b]0;t\x07\u202e"], colour=False) == "run x failed on host\n"


def test_lines_break_between_words_and_rows_of_the_summary_stay_in_their_column() -> None:
    assert wrapped("ddptrain: rank 1 failed", 18) == ["ddptrain: rank 1", "  failed"]
    assert wrapped("  time    start 1.2 s, end 0.5 s", 24) == ["  time    start 1.2 s,", "          end 0.5 s"]
    assert wrapped("in /a/long/path/of/a/run", 12) == ["in", "  /a/long/path/of/a/run"]
