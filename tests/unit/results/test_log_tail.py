"""A log file is followed from its start, and its bytes become the same lines however they are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddptrain.results.log_tail import MAX_LINE_CHARS, LogLine, LogTail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def lines_of(log: Path, *chunks: bytes) -> list[LogLine]:
    """The lines of a log that grows by these chunks."""
    log.write_bytes(b"")
    tail, found = LogTail(log), list[LogLine]()
    for chunk in chunks:
        with log.open("ab") as file:
            file.write(chunk)
        found += tail.read()
    return found + tail.rest()


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"a\nb\r\nc\r\r\n\n", ["a", "b", "c", ""]),
        (b"10%\r50%\r100%\nnext\r", ["100%", "next"]),
        (b"a\xff\xc3(\n\xf0\x9f", ["a\ufffd\ufffd(", "\ufffd"]),
        ("a\x00b\x0bc\x0cd\x85e\u2028f\n".encode(), ["a\x00b\x0bc\x0cd\x85e\u2028f"]),
    ],
)
def test_line_is_what_a_terminal_shows_of_it(log: Path, data: bytes, texts: list[str]) -> None:
    assert [line.text for line in lines_of(log, data)] == texts


def test_only_an_unfinished_progress_bar_is_redrawn(log: Path) -> None:
    tail, states = LogTail(log), []
    assert tail.read() == []  # there is no file yet
    for chunk in (b"plain", b" text\r", b"10%\r", b"2", b"0%", b"\ndone"):
        with log.open("ab") as file:
            file.write(chunk)
        tail.read()
        states.append(tail.redrawn)
    assert states == ["", "plain text", "10%", "2", "20%", ""]


PRINTED = st.lists(st.sampled_from([b"a", b"bcd", b"\r", b"\n", b"\r\n", "ë".encode(), b"\xf0\x9f", b"\xff", b"\0"]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=PRINTED.map(b"".join) | st.binary(max_size=60), draws=st.data())
def test_any_cut_gives_the_same_lines(log: Path, data: bytes, draws: st.DataObject) -> None:
    cuts = sorted(draws.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    chunks = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert lines_of(log, *chunks) == lines_of(log, data)


def test_long_line_is_passed_on_in_pieces(log: Path) -> None:
    log.write_bytes(b"x" * (MAX_LINE_CHARS + 1) + b"\n" + b"z" * MAX_LINE_CHARS + b"\n")
    assert list(LogTail(log).texts()) == ["x" * MAX_LINE_CHARS, "x", "z" * MAX_LINE_CHARS]
