"""Plain text in columns, readable by awk; numbers and durations as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddptrain.sanitize import sanitized

Section = tuple[str, list[tuple[str, str]]]  # a title, and names with their values


def clean(text: str) -> str:
    """Return the text with a mark in place of each character that is unsafe in a terminal."""
    return sanitized(text.replace("\t", "    "), mark="\N{REPLACEMENT CHARACTER}")


def clean_line(text: str) -> str:
    """Return the text as `clean` does, also with a mark for line breaks, which file names may contain."""
    return clean(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def plain_table(table: Sequence[Sequence[str]]) -> str:
    """Return a table with columns aligned by blanks."""
    widths = [max(map(columns_of, column)) for column in zip(*table, strict=True)]
    padded = ("  ".join(map(_padded, row, widths)).rstrip() for row in table)
    return "\n".join(padded)


def columns_of(text: str) -> int:
    """Return how many columns of a terminal a text takes: a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - columns_of(text))


def clean_table(table: Sequence[Sequence[str]]) -> str:
    """Return a table as `plain_table` does, with cells that are safe in a terminal (`clean_line`)."""
    return plain_table([[clean_line(cell) for cell in row] for row in table])


def plain_sections(parts: Sequence[Section]) -> str:
    """Return titles with names and values below them; further lines of a value are indented."""
    blocks = []
    for title, lines in parts:
        width = max(columns_of(name) for name, _ in lines)
        indent = "\n" + " " * (width + 4)
        rows = [f"  {_padded(name, width)}  {value.replace(chr(10), indent)}" for name, value in lines]
        blocks.append("\n".join([title, *rows]))
    return "\n\n".join(blocks)


def number(value: float | None) -> str:
    """Return a number with four significant digits, nan and inf by name; "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return a duration as "42.1 s", "3m 05s" or "2h 07m"; "-" for None, NaN and infinities."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
