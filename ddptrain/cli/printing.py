"""Output of commands: without terminal escape sequences, line by line, in the encoding of the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ddptrain.sanitize import sanitized


def write(lines: Iterable[str], *, colours: bool = False) -> None:
    """Print lines one by one; `colours` keeps colour codes, for text that ddptrain itself formatted.

    Raises BrokenPipeError if the reader has closed the pipe, as `head` does.
    """
    encoding = sys.stdout.encoding
    for line in lines:
        safe = sanitized(line, colours=colours)
        sys.stdout.write(safe.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()


def say(text: str) -> None:
    """Print a message on stderr."""
    if sys.stderr is not None:  # the command was started with its stderr closed
        print(sanitized(text), file=sys.stderr, flush=True)


def print_json(data: object) -> None:
    """Print data as indented JSON on stdout; a number that is not finite is null."""
    import json

    from ddptrain.results.run_record import as_json_data

    write([json.dumps(as_json_data(data), indent=2, allow_nan=False)])
