from __future__ import annotations

import math
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.results.show import plot as chart
from ddptrain.results.show.plot import ChartLine, Style, draw_chart


def test_ascii_shows_a_falling_line_between_its_bounds() -> None:
    text = draw_chart("loss", "step", [ChartLine("train/loss", [0, 10], [4.0, 2.0])], Style(width=40, height=5))
    lines = text.split("\n")
    assert text.isascii()
    assert lines[0] == "loss"
    assert lines[1].startswith("4 |*") and lines[5].startswith("2 |")
    assert lines[5].endswith("*")
    assert lines[7].split() == ["0", "step", "10"]
    assert lines[8] == "** train/loss"
    assert max(map(len, lines)) <= 40


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


def test_single_point_is_in_the_middle_and_a_long_name_is_cut() -> None:
    point = ChartLine("p", [123456], [-2.5])
    text = draw_chart("t", "a long name of the axis that is cut", [point], Style(40, 5, colour=True))
    assert text.split("\n") == [
        "t",
        "-2.25 |",
        "      |",
        " -2.5 |                \x1b[36m*\x1b[0m",
        "      |",
        "-2.75 |",
        "      +---------------------------------",
        "       123456a long name of the ax123456",
        "\x1b[36m**\x1b[0m p",
    ]


def test_marks_and_colours_begin_again_after_the_sixth_line() -> None:
    canvas = chart._Canvas(40, 5, Style(colour=True))
    marks = [
        f"\x1b[{colour}m{mark * 2}\x1b[0m" for colour, mark in zip((36, 33, 35, 32, 34, 31), "*o+x#@", strict=True)
    ]
    assert [canvas.sample(index) for index in range(7)] == [*marks, marks[0]]
    for index in (0, 6):
        canvas.line(index, [(0, index)])
    assert [row for row in canvas.rows() if row] == ["\x1b[36m*\x1b[0m"]
    assert Style() == Style(80, 16, unicode=False, colour=False)


@pytest.mark.parametrize(
    ("start", "end", "dots"),
    [
        ((0, 0), (4, 2), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2)]),
        ((3, 1), (3, 1), [(3, 1)]),
        ((2, 5), (1, 2), [(2, 5), (2, 4), (1, 3), (1, 2)]),
    ],
)
def test_dots_lie_between_two_points(start: tuple[int, int], end: tuple[int, int], dots: list[tuple[int, int]]) -> None:
    assert list(chart._between(start, end)) == dots


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.0, "3"),
        (-7.0, "-7"),
        (9999999.0, "9999999"),
        (1e7, "1e+07"),
        (12345.678, "1.235e+04"),
        (2.5, "2.5"),
    ],
)
def test_numbers_of_the_axes_are_short(value: float, text: str) -> None:
    assert chart._number(value) == text


@pytest.mark.parametrize(
    ("values", "padded", "expected"),
    [
        ([1, 3], True, (1, 3)),
        ([4, 4], True, (3.6, 4.4)),
        ([0, 0], True, (-1.0, 1.0)),
        ([-5], True, (-5.5, -4.5)),
        ([4, 4], False, (4, 4)),
        ([1.7e308], True, (1.53e308, sys.float_info.max)),
        ([-1.7e308], True, (-sys.float_info.max, -1.53e308)),
    ],
)
def test_range_of_equal_values_has_a_margin(values: list[float], padded: bool, expected: tuple[float, float]) -> None:
    assert chart._range(values, padded=padded) == pytest.approx(expected, rel=1e-12)


def test_lines_end_at_values_that_are_not_finite() -> None:
    line = ChartLine("a", [0, 1, math.inf, 3, 4, 5], [math.nan, 1, 2, 3, 4, math.inf])
    assert chart._finite(line) == [[(1, 1)], [(3, 3), (4, 4)]]


def test_dots_have_their_places_in_a_braille_character() -> None:
    names = [[unicodedata.name(chr(chart._BRAILLE | bit)) for bit in row] for row in chart._DOTS]
    assert names == [[f"BRAILLE PATTERN DOTS-{dot}" for dot in row] for row in ((1, 4), (2, 5), (3, 6), (7, 8))]
