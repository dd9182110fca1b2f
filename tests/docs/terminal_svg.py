"""Writes frames of a terminal as one animated SVG: CSS only, so that it also plays inside an <img>."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

CELL_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 18, 14
BACKGROUND, FOREGROUND = "#16181d", "#d7dae0"
_COLOURS = {
    "black": "#5c6370", "red": "#ff6b68", "green": "#8cc570", "brown": "#e5c07b", "blue": "#6cb6ff",
    "magenta": "#d48bd8", "cyan": "#5cc8cf", "white": "#d7dae0", "default": FOREGROUND,
}  # fmt: skip
_HOLD_S = 5.0  # the last frame stays for so long before the film begins again


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of one style, from a column on. `colour` is a name of pyte, or six hex digits."""

    column: int
    text: str
    colour: str = "default"
    bold: bool = False


Row = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What the terminal shows from `at_s` on (seconds)."""

    at_s: float
    rows: tuple[Row, ...]


def shortened(frames: Sequence[Frame], longest_s: float) -> list[Frame]:
    """The same frames without equal neighbours, and no frame shown for longer than that (seconds)."""
    kept: list[Frame] = []
    now_s, before_s = 0.0, 0.0
    for frame in frames:
        if kept and frame.rows == kept[-1].rows:
            continue
        if kept:
            now_s += min(frame.at_s - before_s, longest_s)
        before_s = frame.at_s
        kept.append(Frame(now_s, frame.rows))
    return kept


def animated_svg(frames: Sequence[Frame], columns: int, title: str) -> str:
    """Return the SVG. Equal rows of all frames are written once. A reader who wants no motion sees the last frame."""
    numbers: dict[Row, int] = {}
    for frame in frames:
        for row in frame.rows:
            if row:
                numbers.setdefault(row, len(numbers))
    width = round(columns * CELL_WIDTH + 2 * MARGIN)
    lines = max(len(frame.rows) for frame in frames)
    screen = lines * LINE_HEIGHT
    height = screen + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style(frames, screen)}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
            "<defs>",
            *(f'<g id="r{number}">{_row(row)}</g>' for row, number in numbers.items()),
            "</defs>",
            f'<svg x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN}" height="{screen}"><g class="film">',
            *(_frame(frame, index * screen, numbers) for index, frame in enumerate(frames)),
            "</g></svg></svg>\n",
        ]
    )


def _style(frames: Sequence[Frame], screen: int) -> str:
    total_s = frames[-1].at_s + _HOLD_S
    steps = [
        f"{100 * frame.at_s / total_s:.3f}%{{transform:translateY({-index * screen}px)}}"
        for index, frame in enumerate(frames)
    ]
    end = -(len(frames) - 1) * screen
    return (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        f"fill:{FOREGROUND}}}.b{{font-weight:bold}}"
        f"@keyframes film{{{''.join(steps)}100%{{transform:translateY({end}px)}}}}"
        f".film{{animation:film {total_s:.2f}s step-end infinite}}"
        f"@media (prefers-reduced-motion:reduce){{.film{{animation:none;transform:translateY({end}px)}}}}"
    )


def _row(row: Row) -> str:
    return "".join(_span(span) for span in row)


def _span(span: Span) -> str:
    colour = _COLOURS.get(span.colour) or f"#{span.colour}"
    fill = f' fill="{colour}" style="fill:{colour}"' if colour != FOREGROUND else ""
    bold = ' class="b"' if span.bold else ""
    # The length keeps the columns where a font's characters have other widths.
    length = f'textLength="{len(span.text) * CELL_WIDTH:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{span.column * CELL_WIDTH:.1f}" y="13" {length}{fill}{bold}>{escape(span.text)}</text>'


def _frame(frame: Frame, top: int, numbers: Mapping[Row, int]) -> str:
    rows: Iterable[str] = (
        f'<use href="#r{numbers[row]}" y="{top + line * LINE_HEIGHT}"/>' for line, row in enumerate(frame.rows) if row
    )
    return "".join(rows)
