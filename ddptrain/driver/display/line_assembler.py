"""Splits the bytes that a rank prints into lines. The result does not depend on the sizes of the blocks."""

from __future__ import annotations

import codecs
from typing import NamedTuple

MAX_LINE_CHARS = 64 * 1024  # a longer line is passed on in pieces, so that memory stays bounded


class RankLine(NamedTuple):
    """A line's text; `ended` is False for a piece of a long line and for a last line without a newline."""

    text: str
    ended: bool = True


class LineAssembler:
    """Decodes UTF-8, with replacement characters for invalid bytes; LF and CR LF end a line, a lone CR restarts it."""

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
