from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.results.show.plot import ChartLine, Style, draw_chart


def test_a_terminal_gets_dots_and_colours_of_the_same_width() -> None:
    style = Style(width=60, height=8, unicode=True, colour=True)
    text = draw_chart("t", "x", [ChartLine("a", [0, 1], [0, 1]), ChartLine("b", [0, 1], [1, 0])], style)
    assert "\x1b[36m" in text and "\x1b[33m" in text
    assert any(0x2800 < ord(char) < 0x2900 for char in text)


def test_without_colour_there_is_no_escape_code() -> None:
    assert "\x1b" not in draw_chart("t", "x", [ChartLine("a", [0, 1], [0, 1])], Style(unicode=True))


def test_a_gap_interrupts_the_line() -> None:
    line = ChartLine("a", [0, 1, 2, 3, 4], [1, 1, math.nan, 1, 1])
    (row,) = [row for row in draw_chart("t", "x", [line], Style(width=60)).split("\n")[1:-1] if "*" in row]
    assert "* " in row.rstrip()


@pytest.mark.parametrize("y", [[math.nan], [], [math.inf, -math.inf]])
def test_a_curve_of_no_numbers_says_so(y: list[float]) -> None:
    assert "no finite values" in draw_chart("t", "x", [ChartLine("a", range(len(y)), y)], Style())


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=30),
    st.integers(0, 200),
    st.integers(0, 60),
    st.booleans(),
)
def test_any_numbers_make_a_chart_that_fits(
    points: list[tuple[float, float]], width: int, height: int, unicode: bool
) -> None:
    line = ChartLine("a", [x for x, _ in points], [y for _, y in points])
    text = draw_chart("t", "x", [line], Style(width, height, unicode))
    assert all(len(row) <= max(40, width) for row in text.split("\n"))


FALLING = [ChartLine("down", [0, 5, 10], [8.0, 2.0, 0.0]), ChartLine("flat", [0, 10], [4.0, 4.0])]


def test_ascii_chart_is_drawn_dot_by_dot() -> None:
    assert draw_chart("loss", "step", FALLING, Style(width=20, height=3)).split("\n") == [
        "loss",
        "8 |****",
        "  |    *****",
        "4 |ooooooooooooooooooooooooooooooooooooo",
        "  |                ***********",
        "0 |                           **********",
        "  +-------------------------------------",
        "   0               step               10",
        "** down",
        "oo flat",
    ]


def test_unicode_chart_is_drawn_dot_by_dot() -> None:
    assert draw_chart("loss", "step", FALLING, Style(width=44, height=6, unicode=True)).split("\n") == [
        "loss",
        "8 │⠉⠒⠤⣀⡀",
        "  │    ⠈⠑⠢⠤⣀",
        "  │         ⠉⠑⠢⢄⣀",
        "4 │⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠛⠭⢍⡉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉",
        "  │                  ⠈⠑⠒⠒⠤⠤⠤⢄⣀⣀⣀",
        "0 │                             ⠉⠉⠉⠒⠒⠒⠢⠤⠤⠤⣀⣀",
        "  └─────────────────────────────────────────",
        "   0                 step                 10",
        "⠤⠤ down",
        "⠤⠤ flat",
    ]
