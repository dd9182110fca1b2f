"""How commands print: safe for a terminal, line by line, in whatever encoding the reader has."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ddptrain.sanitize import sanitized


def write(lines: Iterable[str], *, colours: bool = False) -> None:
    """Print lines as they come; `colours` keeps those in them, for lines of ours.

    Raises BrokenPipeError when the reader has gone, as `head` does.
    """
    encoding = sys.stdout.encoding
    for line in lines:
        safe = sanitized(line, colours=colours)
        sys.stdout.write(safe.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()


def say(text: str) -> None:
    """Print a remark on stderr."""
    if sys.stderr is not None:  # the command was started with its stderr closed
        print(sanitized(text), file=sys.stderr, flush=True)
