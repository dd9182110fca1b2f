"""Output of commands: without terminal escape sequences, line by line, in the encoding of the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable

from ddptrain import ci
from ddptrain.sanitize import sanitized


def write(lines: Iterable[str], *, colours: bool = False, is_json: bool = False) -> None:
    """Print lines one by one; `colours` keeps colour codes, for text that ddptrain itself formatted.

    In a CI job they contain no commands for its runner; with `is_json` they stay the same data.

    Raises BrokenPipeError if the reader has closed the pipe, as `head` does.
    """
    encoding = sys.stdout.encoding
    guard = ci.json_guard(os.environ) if is_json else ci.guard(os.environ)
    for line in lines:
        safe = guard(sanitized(line, colours=colours))
        sys.stdout.write(safe.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()


def say(text: str) -> None:
    """Print a message on stderr."""
    if sys.stderr is not None:  # the command was started with its stderr closed
        print(ci.guard(os.environ)(sanitized(text)), file=sys.stderr, flush=True)


def print_json(data: object, indent: int | None = 2) -> None:
    """Print data as JSON on stdout, in one line without `indent`; a number that is not finite is null."""
    from ddptrain.results.run_record import as_json_data

    write([json.dumps(as_json_data(data), indent=indent, allow_nan=False)], is_json=True)


def print_result(data: object, lines: Iterable[str], *, as_json: bool, indent: int | None = 2) -> None:
    """Print the data as JSON, or the lines."""
    if as_json:
        print_json(data, indent)
    else:
        write(lines)
