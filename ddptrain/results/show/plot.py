"""Draws the curves of a run as text: braille dots, or ASCII without Unicode."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddptrain.results.show.curves import Curve, Plot
from ddptrain.text_tables import clean_line

_ASCII_MARKS = "*o+x#@"
_TERMINAL_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red: readable on dark and on light
_NARROWEST = 40
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of the character's row and column


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One curve; it has a gap where y is not finite."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Style:
    """What the output can show."""

    width: int = 80
    height: int = 16
    unicode: bool = False
    colour: bool = False


def draw_chart(title: str, x_name: str, lines: Sequence[ChartLine], style: Style) -> str:
    """Return the chart as lines of text, none wider than `style.width` columns (at least 40)."""
    finite = [_finite(line) for line in lines]
    points = [point for line in finite for run in line for point in run]
    if not points:
        return f"{title}\n(no finite values)"
    x_low, x_high = _range([x for x, _ in points], padded=False)
    y_low, y_high = _range([y for _, y in points], padded=True)
    ticks = [_number(y_high), _number(y_low / 2 + y_high / 2), _number(y_low)]
    margin = max(len(tick) for tick in ticks)
    width, height = max(_NARROWEST, style.width) - margin - 2, max(5, style.height)
    canvas = _Canvas(width, height, style)
    for index, line in enumerate(finite):
        for run in line:
            canvas.line(index, [canvas.place(x, y, (x_low, x_high), (y_low, y_high)) for x, y in run])
    labels = {0: ticks[0], height // 2: ticks[1], height - 1: ticks[2]}
    side, corner, floor = ("│", "└", "─") if style.unicode else ("|", "+", "-")
    rows = [f"{labels.get(row, ''):>{margin}} {side}{text}" for row, text in enumerate(canvas.rows())]
    left, right = _number(x_low), _number(x_high)
    room = width - len(left) - len(right)
    under = f"{left}{x_name[:room]:^{room}}{right}"
    legend = (f"{canvas.sample(index)} {line.label}" for index, line in enumerate(lines))
    return "\n".join((title, *rows, f"{'':>{margin}} {corner}{floor * width}", f"{'':>{margin}}  {under}", *legend))


def _finite(line: ChartLine) -> list[list[tuple[float, float]]]:
    """Return the parts of the line between its gaps."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _range(values: Sequence[float], *, padded: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high and padded:
        margin = abs(low) / 10 or 1.0
        return max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
    return low, high


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"


class _Canvas:
    """A grid of characters with `dots` dots each; a character that several lines cross has the colour of the last."""

    def __init__(self, width: int, height: int, style: Style) -> None:
        self._width, self._height, self._style = width, height, style
        self._dots = (2, 4) if style.unicode else (1, 1)
        self._cells: dict[tuple[int, int], tuple[int, int]] = {}  # (row, column) -> (dots set, line)

    def place(self, x: float, y: float, x_range: tuple[float, float], y_range: tuple[float, float]) -> tuple[int, int]:
        """Return the dot of a point, from the upper left corner."""
        across = _share(x, x_range) * (self._width * self._dots[0] - 1)
        down = (1 - _share(y, y_range)) * (self._height * self._dots[1] - 1)
        return round(across), round(down)

    def line(self, index: int, places: Sequence[tuple[int, int]]) -> None:
        """Connect the dots."""
        for start, end in zip(places, places[1:] or places, strict=False):
            for column, row in _between(start, end):
                cell = row // self._dots[1], column // self._dots[0]
                dot = _DOTS[row % self._dots[1]][column % self._dots[0]]
                self._cells[cell] = self._cells.get(cell, (0, index))[0] | dot, index

    def rows(self) -> Iterator[str]:
        """Yield the rows of text, from the top, without trailing blanks."""
        for row in range(self._height):
            last = max((column for cell_row, column in self._cells if cell_row == row), default=-1)
            yield "".join(self._character(row, column) for column in range(last + 1))

    def _character(self, row: int, column: int) -> str:
        dots, index = self._cells.get((row, column), (0, 0))
        if not dots:
            return " "
        return self._painted(
            chr(_BRAILLE + dots) if self._style.unicode else _ASCII_MARKS[index % len(_ASCII_MARKS)], index
        )

    def sample(self, index: int) -> str:
        """Return a sample of the line, for the legend."""
        return self._painted("⠤⠤" if self._style.unicode else _ASCII_MARKS[index % len(_ASCII_MARKS)] * 2, index)

    def _painted(self, text: str, index: int) -> str:
        return f"\x1b[{_TERMINAL_COLOURS[index % len(_TERMINAL_COLOURS)]}m{text}\x1b[0m" if self._style.colour else text


def _share(value: float, bounds: tuple[float, float]) -> float:
    """The place of a value between the bounds, 0 to 1; halved first, so that the widest range does not overflow."""
    low, high = bounds
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span > 0 else 0.5


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the dots on the way from one dot to another, both included."""
    (x, y), (x_end, y_end) = start, end
    count = max(abs(x_end - x), abs(y_end - y))
    for step in range(count + 1):
        part = step / count if count else 0.0
        yield round(x + (x_end - x) * part), round(y + (y_end - y) * part)


_X_LABELS = {"step": "step", "epoch": "epoch", "time_s": "seconds"}


def terminal_charts(plot: Plot, style: Style) -> str:
    """Return the curves as text, a chart per quantity."""
    x_label = _X_LABELS[plot.x_name]
    return "\n\n".join(
        draw_chart(clean_line(panel.quantity), x_label, [_line(curve) for curve in panel.curves], style)
        for panel in plot.panels
    )


def _line(curve: Curve) -> ChartLine:
    last = next((value for value in reversed(curve.main[1]) if value == value), None)
    label = clean_line(curve.label)
    return ChartLine(label if last is None else f"{label}: {last:.4g}", *curve.main)
