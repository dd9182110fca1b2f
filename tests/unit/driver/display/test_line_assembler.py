"""Bytes become the same lines however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.driver.display import line_assembler as module
from ddptrain.driver.display.line_assembler import LineAssembler, RankLine


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


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "MAX_LINE_CHARS", 4)
    return 4


@pytest.mark.usefixtures("short_limit")
def test_long_line_comes_in_pieces_and_its_end_is_marked() -> None:
    assert assemble(b"abcdefghij\n") == [RankLine("abcd", False), RankLine("efgh", False), RankLine("ij")]


@pytest.mark.usefixtures("short_limit")
def test_line_of_exactly_the_limit_is_one_line() -> None:
    assert assemble(b"abcd\nefgh") == [RankLine("abcd"), RankLine("efgh", False)]


PRINTED = st.lists(st.sampled_from([b"a", b"bcd", b"\r", b"\n", b"\r\n", "ë".encode(), b"\xf0\x9f", b"\xff", b"\0"]))


@given(PRINTED.map(b"".join) | st.binary(max_size=60), st.data())
def test_any_cut_gives_the_same_lines(data: bytes, draws: st.DataObject) -> None:
    cuts = sorted(draws.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    chunks = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    limit = module.MAX_LINE_CHARS
    module.MAX_LINE_CHARS = draws.draw(st.sampled_from([1, 3, limit]))
    try:
        assert assemble(*chunks) == assemble(data)
    finally:
        module.MAX_LINE_CHARS = limit


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)))
def test_what_is_printed_is_what_is_shown(printed: list[str]) -> None:
    assert texts("".join(f"{line}\n" for line in printed).encode()) == printed


def test_ten_megabyte_line_loses_nothing() -> None:
    chunk = b"x" * 100_000
    found = assemble(*[chunk] * 100, b"\n")
    assert sum(len(line.text) for line in found) == 10_000_000
    assert max(len(line.text) for line in found) == module.MAX_LINE_CHARS
    assert [line.ended for line in found].count(True) == 1


def test_line_is_passed_on_in_pieces_of_64_kibibytes() -> None:
    lines = LineAssembler()
    assert lines.feed(b"x" * 65_536) == []
    assert lines.feed(b"y") == [RankLine("x" * 65_536, ended=False)]
    assert lines.feed(b"\n" + b"z" * 65_536 + b"\n") == [RankLine("y"), RankLine("z" * 65_536)]
