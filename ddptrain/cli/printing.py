"""How commands print: line by line, in whatever encoding the reader has."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def write(lines: Iterable[str]) -> None:
    """Print lines as they come. Raises BrokenPipeError when the reader has gone, as `head` does."""
    encoding = sys.stdout.encoding
    for line in lines:
        sys.stdout.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()
