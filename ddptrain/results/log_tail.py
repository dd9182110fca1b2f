"""Follows a growing log: its lines, as a terminal would show them."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddptrain.file_ops import open_regular
from ddptrain.results.errors import results_errors

READ_BYTES = 64 * 1024  # per read; small, because each short line becomes an object
MAX_LINE_CHARS = 256 * 1024  # a longer line is passed on in pieces, so that memory stays bounded


class LogLine(NamedTuple):
    """A line's text; `ended` is False for a piece of a long line and for a last line without a newline."""

    text: str
    ended: bool = True


class LogTail:
    """Reads a file that may not exist yet, from `offset` (in bytes), or from its last `lines` lines on.

    It decodes UTF-8, with replacement characters for invalid bytes; LF and CR LF end a line, a lone CR restarts it. The
    lines do not depend on the sizes of the reads.
    """

    def __init__(self, path: Path, lines: int | None = None, offset: int = 0) -> None:
        self.path, self.offset = path, offset if lines is None else start_of_last(path, lines)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # of the unfinished line; a "\r" at its end may begin CR LF, or the next state of a bar
        self._is_redrawn = False  # the unfinished line has had a "\r"

    def read(self, size: int = READ_BYTES) -> list[LogLine]:
        """Return the lines that the next `size` bytes complete. Raises OSError if the file can't be read."""
        try:
            descriptor = open_regular(self.path)
        except FileNotFoundError:
            return []
        try:
            data = os.pread(descriptor, size, self.offset)
        finally:
            os.close(descriptor)
        self.offset += len(data)
        return self._cut(self._decoder.decode(data)) if data else []

    def lines(self) -> Iterator[LogLine]:
        """Yield all lines up to the present end of the file. Raises ResultsError."""
        before = -1
        while self.offset != before:
            before = self.offset
            with results_errors(self.path, "read"):
                lines = self.read()
            yield from lines

    def texts(self) -> Iterator[str]:
        """Yield the texts of lines()."""
        return (line.text for line in self.lines())

    @property
    def redrawn(self) -> str:
        """The unfinished line as a terminal shows it, if it uses carriage returns, as progress bars do; else ""."""
        return self._text.removesuffix("\r") if self._is_redrawn else ""

    def rest(self) -> list[LogLine]:
        """Return the last line of the file, if it has no newline."""
        lines = self._cut(self._decoder.decode(b"", True))
        text, self._text, self._is_redrawn = self._text.removesuffix("\r"), "", False
        return [*lines, LogLine(text, ended=False)] if text else lines

    def _cut(self, text: str) -> list[LogLine]:
        *ended, text = (self._text + text).split("\n")
        lines: list[LogLine] = []
        for part in ended:
            if len(part) <= MAX_LINE_CHARS and "\r" not in part:  # nearly every line
                lines.append(LogLine(part))
            else:
                *pieces, last = _pieces(part)
                lines += [*(LogLine(piece, ended=False) for piece in pieces), LogLine(last)]
        self._is_redrawn = "\r" in text or (self._is_redrawn and not ended)
        *pieces, last = _pieces(text)
        lines += [LogLine(piece, ended=False) for piece in pieces]
        self._text = f"{last}\r" if text.endswith("\r") else last
        return lines


def start_of_last(path: Path, lines: int) -> int:
    """Return the offset of the last `lines` lines of a file; a last line without a newline counts."""
    with results_errors(path, "read"):
        try:
            descriptor = open_regular(path)
        except FileNotFoundError:
            return 0
    with os.fdopen(descriptor, "rb") as file:
        end = file.seek(0, 2)
        position = end - 1 if lines > 0 else 0  # the last byte ends the last line, or is part of it
        while position > 0:
            start = max(0, position - READ_BYTES)
            file.seek(start)
            block = file.read(position - start)
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                lines -= 1
                if lines == 0:
                    return start + at + 1
            position = start
        return 0 if lines > 0 else end


def _pieces(line: str) -> list[str]:
    """Return what a terminal shows of a line with carriage returns, in pieces of bounded length."""
    shown = line.rstrip("\r").rpartition("\r")[2]
    return [shown[at : at + MAX_LINE_CHARS] for at in range(0, len(shown) or 1, MAX_LINE_CHARS)]
