"""A terminal, pipe or file that is written to: which output and colours it gets, and a stream that never blocks."""

from __future__ import annotations

import codecs
import errno
import os
import re
import select
import textwrap
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from ddptrain.errors import UsageError
from ddptrain.sanitize import sanitized
from ddptrain.text_tables import columns_of

POLL_S = 0.1
MODES = ("auto", "live", "plain", "json")
RESET = "\x1b[0m"
CYAN, YELLOW, RED, GREEN, DIM = "36", "33", "31", "32", "2"
RANK_COLOURS = (CYAN, YELLOW, "35", GREEN, "34", "96", "93", "95", "92", "94")  # without red, which is for errors


def choose_mode(mode: str, is_terminal: bool, environ: Mapping[str, str]) -> str:
    """Return the output for a mode: "live", "plain" or "json". Raises UsageError for an unknown mode."""
    if mode not in MODES:
        raise UsageError(f"unknown output mode {mode!r}; choose one of {', '.join(MODES)}")
    if mode != "auto":
        return "plain" if mode == "live" and not is_terminal else mode
    in_ci = environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off")
    dumb = environ.get("TERM", "") in ("dumb", "unknown")
    return "live" if is_terminal and not in_ci and not dumb else "plain"


def wants_colour(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Return whether to use colours: NO_COLOR and FORCE_COLOR decide, else a terminal has colours unless it is dumb."""
    if environ.get("NO_COLOR", ""):
        return False
    force = environ.get("FORCE_COLOR", "").lower()
    if force:
        return force not in ("0", "false")
    return is_terminal and environ.get("TERM", "") not in ("dumb", "unknown")


def coloured(text: str, code: str) -> str:
    """Return the text in a colour (an SGR code, such as "36"); "" is none."""
    return f"\x1b[{code}m{text}{RESET}" if code and text else text


def rank_colour(rank: int) -> str:
    """Return the rank's colour (an SGR code) for its prefix and its bar."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def harmless(text: str, colour: bool) -> str:
    """Return a line without control sequences; with `colour`, colours stay, and are reset at its end."""
    text = sanitized(text, colours=colour)
    return text + RESET if "\x1b" in text else text


def cropped(text: str, width: int) -> str:
    """Return the beginning of the text that fits into `width` columns."""
    if columns_of(text) <= width:
        return text
    from rich.cells import set_cell_size  # only a live display needs it

    return set_cell_size(text, max(width, 0)).rstrip()


def wrapped(line: str, columns: int) -> list[str]:
    """Return the line in pieces that fit, with a break between words; only a word, such as a path, may be longer."""
    if columns_of(line) <= columns or "\x1b" in line:
        return [line]
    head = re.match(r"  \w+ +(?=\S)", line)  # of a row of the summary: a name, then its text
    indent = " " * (len(head[0]) if head else 2)
    wrap = textwrap.TextWrapper(columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(line)


def short_run_id(run_id: str) -> str:
    """Return the end of a run's id, which differs from that of other runs of the same name, where there is no room."""
    return run_id if len(run_id) <= 12 else f"...{run_id[-4:]}"


def terminal_size(fd: int, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the current columns and rows of the terminal; without a size, COLUMNS and LINES, or 80 x 24."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns = rows = 0
    return columns or _number(environ, "COLUMNS", 80), rows or _number(environ, "LINES", 24)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else default


class Stream:
    """Writes text to a file, and never raises; `broken` is the reason why nothing can be written any more, or "".

    `write` waits for the reader, so only the display's daemon thread calls it.
    """

    def __init__(self, file: TextIO | None) -> None:
        self.broken = "" if file is not None else "closed"
        self.sent_bytes = 0
        self.encoding = codecs.lookup(getattr(file, "encoding", None) or "utf-8").name
        self.fd = -1
        self._file = file
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

        With `timeout_s`, write only what the reader takes in this time; at least one write is tried.
        """
        if self.broken or not text:
            return
        rest = memoryview(text.encode(self.encoding, "replace"))
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if self.fd < 0 and self._file is not None:
                self._file.write(bytes(rest).decode(self.encoding))
                self._file.flush()
                return
            while rest:
                if end_s is not None and not self._has_room(max(end_s - time.monotonic(), 0.0)):
                    return
                try:
                    # A pipe with room takes PIPE_BUF bytes without blocking; `sent_bytes` shows that a reader reads.
                    count = os.write(self.fd, rest[: select.PIPE_BUF])
                except BlockingIOError:  # another process has made it non-blocking
                    self._has_room(POLL_S)
                    continue
                rest = rest[count:]
                self.sent_bytes += count
        except (OSError, ValueError) as error:
            self.broken = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if self.fd >= 0 and isinstance(error, OSError) and error.errno != errno.EBADF:
                # Later writes of this process, also at the exit of the interpreter, go to /dev/null.
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self.fd)
                os.close(devnull)

    def _has_room(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1000))
