"""Plain text in columns, for people and for awk."""

from __future__ import annotations

from collections.abc import Sequence

from ddptrain.sanitize import sanitized

Section = tuple[str, list[tuple[str, str]]]  # a title, and names with their values


def clean(text: str) -> str:
    """The text with a mark for what would move a terminal's cursor or mislead its reader."""
    return sanitized(text.replace("\t", "    "), mark="\N{REPLACEMENT CHARACTER}")


def on_a_line(text: str) -> str:
    """The same where it must not break its line either, as a file's name may."""
    return clean(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def plain_table(table: Sequence[Sequence[str]]) -> str:
    """Columns aligned with blanks, for people and for awk."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    padded = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return "\n".join(padded)


def plain_sections(parts: Sequence[Section]) -> str:
    """Titles, and under each its names and values; a value of several lines is indented."""
    blocks = []
    for title, lines in parts:
        width = max(len(name) for name, _ in lines)
        indent = "\n" + " " * (width + 4)
        blocks.append(
            "\n".join([title, *(f"  {name:{width}}  {value.replace(chr(10), indent)}" for name, value in lines)])
        )
    return "\n\n".join(blocks)
