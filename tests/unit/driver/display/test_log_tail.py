"""A log file is followed from its start, and its bytes become the same lines however they are cut."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ddptrain.driver.display.log_tail import MAX_LINE_CHARS, READ_BYTES, LineAssembler, LogTail, RankLine


def assemble(*chunks: bytes) -> list[RankLine]:
    assembler = LineAssembler()
    found = [line for chunk in chunks for line in assembler.feed(chunk)]
    return found + assembler.finish()


def texts(data: bytes) -> list[str]:
    return [line.text for line in assemble(data)]


def test_newline_and_windows_newline_end_a_line() -> None:
    assert assemble(b"a\nb\r\nc\r\r\n\n") == [RankLine("a"), RankLine("b"), RankLine("c"), RankLine("")]


def test_last_line_without_newline_comes_at_the_end_and_is_marked() -> None:
    assert assemble(b"a\nb") == [RankLine("a"), RankLine("b", ended=False)]


def test_nothing_makes_no_line() -> None:
    assert assemble() == assemble(b"") == []


def test_text_after_the_last_carriage_return_wins() -> None:
    assert texts(b"10%\r50%\r100%\nnext\r") == ["100%", "next"]


def test_character_broken_between_chunks_is_whole() -> None:
    data = "Zoë 🐶\n".encode()
    assert assemble(*(data[i : i + 1] for i in range(len(data)))) == [RankLine("Zoë 🐶")]


def test_broken_utf8_is_replaced_and_the_rest_kept() -> None:
    assert texts(b"a\xff\xc3(\n\xf0\x9f") == ["a\ufffd\ufffd(", "\ufffd"]


def test_other_line_separators_and_nul_stay_in_the_line() -> None:
    text = "a\x00b\x0bc\x0cd\x85e\u2028f"
    assert texts(text.encode() + b"\n") == [text]


def test_redrawn_tells_the_state_of_an_unfinished_progress_bar_only() -> None:
    assembler = LineAssembler()
    states = []
    for chunk in (b"plain", b" text\r", b"10%\r", b"2", b"0%", b"\ndone"):
        assembler.feed(chunk)
        states.append(assembler.redrawn)
    assert states == ["", "plain text", "10%", "2", "20%", ""]


PRINTED = st.lists(st.sampled_from([b"a", b"bcd", b"\r", b"\n", b"\r\n", "ë".encode(), b"\xf0\x9f", b"\xff", b"\0"]))


@given(PRINTED.map(b"".join) | st.binary(max_size=60), st.data())
def test_any_cut_gives_the_same_lines(data: bytes, draws: st.DataObject) -> None:
    cuts = sorted(draws.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    chunks = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert assemble(*chunks) == assemble(data)


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)))
def test_what_is_printed_is_what_is_shown(printed: list[str]) -> None:
    assert texts("".join(f"{line}\n" for line in printed).encode()) == printed


def test_ten_megabyte_line_loses_nothing() -> None:
    chunk = b"x" * 100_000
    found = assemble(*[chunk] * 100, b"\n")
    assert sum(len(line.text) for line in found) == 10_000_000
    assert max(len(line.text) for line in found) == MAX_LINE_CHARS
    assert [line.ended for line in found].count(True) == 1


def test_line_is_passed_on_in_pieces_of_64_kibibytes() -> None:
    lines = LineAssembler()
    assert lines.feed(b"x" * 65_536) == []
    assert lines.feed(b"y") == [RankLine("x" * 65_536, ended=False)]
    assert lines.feed(b"\n" + b"z" * 65_536 + b"\n") == [RankLine("y"), RankLine("z" * 65_536)]


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
