"""Output of commands: without terminal escape sequences, line by line, in the encoding of the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress

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


def say(text: object, *, raw: bool = False) -> None:
    """Print a message on stderr, after the name of the command; `raw`: the lines of another process as they are."""
    if sys.stderr is not None:  # the command was started with its stderr closed
        with suppress(OSError, ValueError):  # it is a full disk or a closed pipe: what the command does matters more
            print(sanitized(str(text) if raw else f"ddptrain: {text}"), file=sys.stderr, flush=True)


def print_json(data: object, indent: int | None = 2) -> None:
    """Print data as JSON on stdout, in one line without `indent`; a number that is not finite is null."""
    from ddptrain.results.run_record import as_json_data

    write([json.dumps(as_json_data(data), indent=indent, allow_nan=False)])


def print_result(data: object, lines: Iterable[str], *, as_json: bool, indent: int | None = 2) -> None:
    """Print the data as JSON, or the lines."""
    if as_json:
        print_json(data, indent)
    else:
        write(lines)
