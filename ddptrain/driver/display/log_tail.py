"""Follows the log file of one rank while the rank appends to it, and splits it into lines."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import NamedTuple

from ddptrain.file_ops import open_regular

READ_BYTES = 64 * 1024  # per read; small, because each short line becomes an object
MAX_LINE_CHARS = 64 * 1024  # a longer line is passed on in pieces, so that memory stays bounded


class RankLine(NamedTuple):
    """A line's text; `ended` is False for a piece of a long line and for a last line without a newline."""

    text: str
    ended: bool = True


class LineAssembler:
    """Splits the bytes that a rank prints into lines. The result does not depend on the sizes of the blocks.

    It decodes UTF-8, with replacement characters for invalid bytes; LF and CR LF end a line, a lone CR restarts it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._returned = False  # the last character was "\r": the next one overwrites the text
        self._redrawn = False  # this line has had a "\r": it is a progress bar, or its "\n" follows

    @property
    def redrawn(self) -> str:
        """The unfinished line as a terminal shows it, if it uses carriage returns; else ""."""
        return self._text if self._redrawn else ""

    def feed(self, data: bytes) -> list[RankLine]:
        """Return the lines that `data` completes, and the pieces of a line that has become too long."""
        return self._cut(self._decoder.decode(data))

    def finish(self) -> list[RankLine]:
        """Return the last line of the stream, if it has no newline."""
        lines = self._cut(self._decoder.decode(b"", True))
        if self._text:
            lines.append(RankLine(self._text, ended=False))
        return lines

    def _cut(self, text: str) -> list[RankLine]:
        lines: list[RankLine] = []
        first, *others = text.split("\n")
        self._extend(first, lines)
        if not others:
            return lines
        lines.append(RankLine(self._text))
        self._restart()
        last = others.pop()
        for part in others:
            if len(part) <= MAX_LINE_CHARS and "\r" not in part:  # the fast path for nearly every line
                lines.append(RankLine(part))
            else:
                self._extend(part, lines)
                lines.append(RankLine(self._text))
                self._restart()
        self._extend(last, lines)
        return lines

    def _extend(self, text: str, lines: list[RankLine]) -> None:
        """Add text without a newline to the current line."""
        for index, part in enumerate(text.split("\r")):
            if index:
                self._returned = self._redrawn = True
            if part:
                self._append(part, lines)

    def _append(self, part: str, lines: list[RankLine]) -> None:
        if self._returned:
            self._text, self._returned = "", False
        self._text += part
        while len(self._text) > MAX_LINE_CHARS:
            lines.append(RankLine(self._text[:MAX_LINE_CHARS], ended=False))
            self._text = self._text[MAX_LINE_CHARS:]

    def _restart(self) -> None:
        self._text, self._returned, self._redrawn = "", False, False


class LogTail:
    """Reads a file that may not exist yet, from `offset` (in bytes) up to `end`, once `end` is set."""

    def __init__(self, path: Path, offset: int = 0, *, keep_open: bool = True) -> None:
        """`keep_open`: keep the file open between reads; the number of open files of a process is limited."""
        self._keep_open = keep_open
        self.path = path
        self.offset = offset
        self.end: int | None = None
        self._lines = LineAssembler()
        self._fd = -1
        self._shown, self._due_s = "", 0.0

    @property
    def drained(self) -> bool:
        """Whether everything up to `end` has been read."""
        return self.end is not None and self.offset >= self.end

    def read(self) -> list[RankLine]:
        """Return the lines that the next READ_BYTES bytes complete."""
        size = READ_BYTES if self.end is None else min(READ_BYTES, self.end - self.offset)
        if size <= 0:
            return []
        try:
            if self._fd < 0:
                self._fd = open_regular(self.path)
            data = os.pread(self._fd, size, self.offset)
            if not self._keep_open:
                self.close()
        except OSError:  # the file is missing, or a network file system has dropped the handle: open it again next time
            self.close()
            return []
        self.offset += len(data)
        return self._lines.feed(data) if data else []

    @property
    def is_redrawn(self) -> bool:
        """Whether there is a redrawn line, such as a progress bar, that must be shown again later."""
        return bool(self._lines.redrawn or self._shown)

    def size(self) -> int:
        """Return the file's size now, in bytes; 0 if there is no file."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def redrawn(self, now_s: float, every_s: float) -> str | None:
        """Return the new state of a redrawn line, "" once it has ended; None if it is not due or has not changed."""
        state = self._lines.redrawn
        if not state:
            was_shown, self._shown, self._due_s = bool(self._shown), "", 0.0
            return "" if was_shown else None
        if not self._due_s:
            self._due_s = now_s + every_s  # a bar that ends sooner is shown only at its end
        if now_s < self._due_s or state == self._shown:
            return None
        self._shown, self._due_s = state, now_s + every_s
        return state

    def finish(self) -> list[RankLine]:
        """Return the last line, if it has no newline."""
        return self._lines.finish()

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
