"""A terminal, pipe or file that is written to: which output and colours it gets, and how text is made to fit."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from ddptrain.errors import UsageError
from ddptrain.results.log_tail import LogLine
from ddptrain.sanitize import sanitized
from ddptrain.text_tables import columns_of

MODES = ("auto", "live", "plain", "json")
# SGR codes, and the names that rich has for them.
STYLES = {"cyan": "36", "yellow": "33", "red": "31", "green": "32", "dim": "2", "magenta": "35", "blue": "34"}
RANK_STYLES = ("cyan", "yellow", "magenta", "green", "blue")  # without red, which is for errors
_POLL_S = 0.1
_PIECE_BYTES = select.PIPE_BUF  # a pipe with room takes so much without blocking


def choose_mode(mode: str, is_terminal: bool, environ: Mapping[str, str]) -> str:
    """Return the output for a mode: "live", "plain" or "json". Raises UsageError for an unknown mode."""
    if mode not in MODES:
        raise UsageError(f"unknown output mode {mode!r}; choose one of {', '.join(MODES)}")
    if mode != "auto":
        return "plain" if mode == "live" and not is_terminal else mode
    in_ci = environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off")
    return "live" if is_terminal and not in_ci and not _is_dumb(environ) else "plain"


def wants_colour(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Return whether to use colours: NO_COLOR and FORCE_COLOR decide, else a terminal has colours unless it is dumb."""
    if environ.get("NO_COLOR", ""):
        return False
    if force := environ.get("FORCE_COLOR", "").lower():
        return force not in ("0", "false")
    return is_terminal and not _is_dumb(environ)


def _is_dumb(environ: Mapping[str, str]) -> bool:
    return environ.get("TERM", "") in ("dumb", "unknown")


def coloured(text: str, style: str) -> str:
    """Return the text in a style of STYLES; "" is none."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text else text


def rank_style(rank: int) -> str:
    """Return the rank's style for its prefix and its bar."""
    return RANK_STYLES[rank % len(RANK_STYLES)]


def harmless(text: str, colour: bool = False) -> str:
    """Return a line without control sequences; with `colour`, colours stay, and are reset at its end."""
    text = sanitized(text, colours=colour)
    return f"{text}\x1b[0m" if "\x1b" in text else text


def wrapped(line: str, columns: int) -> list[str]:
    """Return the line in pieces that fit, with a break between words; only a word, such as a path, may be longer."""
    if columns_of(line) <= columns or "\x1b" in line:
        return [line]
    head = re.match(r"  \w+ +(?=\S)", line)  # of a row of the summary: a name, then its text
    indent = " " * (len(head[0]) if head else 2)
    wrap = textwrap.TextWrapper(columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(line)


def terminal_size(fd: int) -> tuple[int, int]:
    """Return the current columns and rows of the terminal; without a size, COLUMNS and LINES, or 80 x 24."""
    columns = rows = 0
    with suppress(OSError):
        columns, rows = os.get_terminal_size(fd)
    known = shutil.get_terminal_size()
    return columns or known.columns, rows or known.lines


def format_lines(rank: int | None, lines: Sequence[LogLine], colour: bool, on_terminal: bool) -> str:
    """Return the lines as text, each with the prefix of the rank, None for no prefix.

    On a terminal they have no control sequences other than colours.
    """
    prefix = "" if rank is None else f"{coloured(f'[rank {rank}]', rank_style(rank) if colour else '')} "
    if on_terminal:
        return "".join([f"{prefix}{harmless(line.text, colour)}\n" for line in lines])
    return "".join([f"{prefix}{line.text}\n" for line in lines])


def format_own(lines: Sequence[str], colour: bool, columns: int | None = None, style: str = "") -> str:
    """Return lines of ddptrain itself as text, without control sequences other than colours, fitted to `columns`."""
    safe = (harmless(line, colour) for line in lines)
    parts = (part for line in safe for part in (wrapped(line, columns) if columns else [line]))
    return "".join(f"{coloured(part, style if colour else '')}\n" for part in parts)


def notice(text: str) -> list[str]:
    """Return the lines of a message of ddptrain itself."""
    return [f"ddptrain: {line}" for line in text.splitlines()]


class Stream:
    """Writes text to a file, and never raises; `broken` is the reason why nothing can be written any more, or "".

    `write` waits for the reader, so only the display's daemon thread calls it; `sent_bytes` shows that somebody reads.
    """

    def __init__(self, file: TextIO | None) -> None:
        self.broken = "" if file is not None else "closed"
        self.sent_bytes = 0
        self.encoding = getattr(file, "encoding", None) or "utf-8"
        self.fd, self._file = -1, file
        with suppress(OSError, ValueError, AttributeError):  # it has no descriptor
            if file is not None:
                file.flush()
                self.fd = file.fileno()

    @property
    def is_terminal(self) -> bool:
        """Whether the stream is a terminal."""
        return self.fd >= 0 and os.isatty(self.fd)

    def write(self, text: str, timeout_s: float | None = None) -> None:
        """Write whole lines; characters that the encoding does not have become "?".

        With `timeout_s`, stop when the reader takes nothing for this time.
        """
        rest = memoryview(text.encode(self.encoding, "replace"))
        if self.fd < 0 and self._file is not None:
            self._file.write(bytes(rest).decode(self.encoding))
            return
        while rest and not self.broken:
            try:
                if timeout_s is not None and not self._has_room(timeout_s):
                    return
                count = os.write(self.fd, rest[:_PIECE_BYTES])
                rest, self.sent_bytes = rest[count:], self.sent_bytes + count
            except BlockingIOError:  # another process has made it non-blocking
                self._has_room(_POLL_S)
            except OSError as error:
                self.broken = error.strerror or str(error)
                if error.errno != errno.EBADF:
                    # Later writes of this process, also at the exit of the interpreter, go to /dev/null.
                    devnull = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(devnull, self.fd)
                    os.close(devnull)

    def _has_room(self, timeout_s: float) -> bool:
        return bool(select.select([], [self.fd], [], timeout_s)[1])
