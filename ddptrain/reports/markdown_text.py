"""Text of others in Markdown: names, messages and logs can contain anything, and none of it becomes markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddptrain.config.wording import shorten
from ddptrain.text_tables import clean, clean_line

_LONGEST_SPAN = 500
_LONGEST_LINK = 2000
_LINK = re.compile(r"https?://[^\s<>()\[\]`|\"'\\]+")


def code(text: str) -> str:
    """Return one line as a code span: no link, no mention of a user, no HTML."""
    line = clean_line(shorten(text.strip(), _LONGEST_SPAN)) or "-"
    fence = _fence(line, 1)
    space = " " if "`" in (line[0], line[-1]) else ""
    return f"{fence}{space}{line}{space}{fence}"


def cell(text: str) -> str:
    """Return one line as a code span for a table."""
    return code(text).replace("|", "\\|")


def fenced(text: str, language: str = "text") -> str:
    """Return the text as a code block."""
    shown = clean(text.rstrip())
    fence = _fence(shown, 3)
    return f"{fence}{language}\n{shown}\n{fence}"


def link(label: str, url: str) -> str:
    """Return a link; other addresses than plain HTTP ones as code."""
    return f"[{label}]({url})" if _LINK.fullmatch(url) else code(url)


def is_plain_link(url: str) -> bool:
    """Return whether a text is an HTTP address that cannot be anything else."""
    return len(url) <= _LONGEST_LINK and _LINK.fullmatch(url) is not None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def details(summary: str, body: str) -> str:
    """Return a block that is folded; `summary` is text of our own."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def _fence(text: str, least: int) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(least, longest + 1)
