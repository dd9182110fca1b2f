"""Which output fits, when there are colours, and what may not reach a terminal."""

from __future__ import annotations

import pytest

from ddptrain.driver.display.plain import format_own
from ddptrain.driver.display.terminal import (
    choose_mode,
    cropped,
    harmless,
    terminal_size,
    wants_colour,
    wrapped,
)
from ddptrain.errors import UsageError
from ddptrain.text_tables import columns_of


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


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'fancy'; choose one of auto, live, plain, json"):
        choose_mode("fancy", True, {})


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
        ("plain\ttext ë", "plain\ttext ë"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[38;5;9mred", "\x1b[38;5;9mred\x1b[0m"),
        ("a\x1b[2J\x1b[1;1H\x1b[?25lb", "ab"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        ("\x1bP1;2|data\x1b\\a\x1b(Bb\x1b7c\x1bc", "abc"),
        ("a\x00\x07\x08\x0b\x0c\x7f\x9bb", "ab"),
        ("unfinished \x1b[3", "unfinished "),
        ("\x1b]0;never ends", "0;never ends"),
        ("\x1b", ""),
    ],
)
def test_only_colours_reach_a_terminal(printed: str, shown: str) -> None:
    assert harmless(printed, colour=True) == shown


def test_without_colours_none_are_left() -> None:
    assert harmless("\x1b[31mred\x1b[0m", colour=False) == "red"


def test_wide_and_combining_characters_are_measured_and_cropped() -> None:
    assert [columns_of("abc"), columns_of("日本"), columns_of("e\u0301")] == [3, 4, 1]
    assert [cropped("abc", 2), cropped("日本", 3), cropped("日本", 4)] == ["ab", "日", "日本"]


def test_size_is_that_of_the_environment_where_there_is_no_terminal() -> None:
    assert terminal_size(-1, {"COLUMNS": "100", "LINES": "x"}) == (100, 24)


def test_our_own_lines_may_quote_others_and_are_made_safe_in_a_pipe_too() -> None:
    assert format_own(["run x failed on host\x1b[2J\x1b]0;t\x07\u202e"], colour=False) == "run x failed on host\n"


def test_lines_break_between_words_and_rows_of_the_summary_stay_in_their_column() -> None:
    assert wrapped("ddptrain: rank 1 failed", 18) == ["ddptrain: rank 1", "  failed"]
    assert wrapped("  time    start 1.2 s, end 0.5 s", 24) == ["  time    start 1.2 s,", "          end 0.5 s"]
    assert wrapped("in /a/long/path/of/a/run", 12) == ["in", "  /a/long/path/of/a/run"]
