"""The lines that ranks print: follows the log file of each rank while it grows, and leaves out equal lines."""

from __future__ import annotations

import codecs
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ddptrain.file_ops import open_regular

READ_BYTES = 64 * 1024  # per read; small, because each short line becomes an object
MAX_LINE_CHARS = 64 * 1024  # a longer line is passed on in pieces, so that memory stays bounded
HOLD_S = 0.4  # how long a line of another rank waits for the same line of rank 0; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
MAX_KNOWN = 100_000  # lines; after that, equal lines may be shown again
TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES, MAX_TRACEBACKS = 1000, 100


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
        self._text = ""  # of the unfinished line; a "\r" at its end may begin CR LF, or the next state of a bar
        self._is_redrawn = False  # the unfinished line has had a "\r"

    @property
    def redrawn(self) -> str:
        """The unfinished line as a terminal shows it, if it uses carriage returns; else ""."""
        return self._text.removesuffix("\r") if self._is_redrawn else ""

    def feed(self, data: bytes) -> list[RankLine]:
        """Return the lines that `data` completes, and the pieces of a line that has become too long."""
        return self._cut(self._decoder.decode(data))

    def finish(self) -> list[RankLine]:
        """Return the last line of the stream, if it has no newline."""
        lines = self._cut(self._decoder.decode(b"", True))
        rest = self._text.removesuffix("\r")
        return [*lines, RankLine(rest, ended=False)] if rest else lines

    def _cut(self, text: str) -> list[RankLine]:
        *ended, text = (self._text + text).split("\n")
        lines: list[RankLine] = []
        for part in ended:
            if len(part) <= MAX_LINE_CHARS and "\r" not in part:  # nearly every line
                lines.append(RankLine(part))
            else:
                *pieces, last = _pieces(part)
                lines += [*(RankLine(piece, ended=False) for piece in pieces), RankLine(last)]
        self._is_redrawn = "\r" in text or (self._is_redrawn and not ended)
        *pieces, last = _pieces(text)
        lines += [RankLine(piece, ended=False) for piece in pieces]
        self._text = f"{last}\r" if text.endswith("\r") else last
        return lines


def _pieces(line: str) -> list[str]:
    """Return what a terminal shows of a line with carriage returns, in pieces of bounded length."""
    shown = line.rstrip("\r").rpartition("\r")[2]
    return [shown[at : at + MAX_LINE_CHARS] for at in range(0, len(shown) or 1, MAX_LINE_CHARS)]


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


RankLines = tuple[int, Sequence[RankLine]]  # a rank, and lines that it has printed


class AllLines:
    """Passes on all lines of all ranks."""

    only_bar_of: int | None = None  # the rank whose redrawn line is shown; None: of each rank

    def add(self, rank: int, lines: Sequence[RankLine], now_s: float) -> Iterable[RankLines]:
        """Add lines that a rank has printed, at a monotonic time in seconds; return what can be shown now."""
        return [(rank, lines)] if lines else []

    def due(self, now_s: float) -> Iterable[RankLines]:
        """Return what was held long enough."""
        return ()

    def flush(self) -> Iterable[RankLines]:
        """Return everything that is to be shown of what is held."""
        return ()


class DifferingLines(AllLines):
    """Passes on all lines of rank 0, and each line of other ranks that no rank before has printed.

    The lines of each rank keep their order. A line that a rank repeats is shown again, unless another rank was first.
    """

    only_bar_of = 0

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._first: dict[int, int] = {}  # hash of a line -> the rank that has printed it first, or 0
        self._of_first: list[RankLine] = []
        self._held: deque[tuple[float, int, RankLine]] = deque()
        self._chars = 0

    def add(self, rank: int, lines: Sequence[RankLine], now_s: float) -> Iterable[RankLines]:
        """Hold the lines; `due` returns them."""
        if len(self._first) > MAX_KNOWN:
            self._first.clear()
        if rank == 0:
            self._of_first += lines
            self._first.update((hash(line), 0) for line in lines)
            return ()
        self._held.extend((now_s, rank, line) for line in lines)
        self._chars += sum(len(line.text) for line in lines)
        return ()

    def due(self, now_s: float) -> Iterator[RankLines]:
        """Yield the lines to show of those that were held long enough."""
        if self._of_first:
            yield 0, self._of_first
            self._of_first = []
        for rank, lines in itertools.groupby(self._taken(now_s), lambda item: item[0]):
            yield rank, [line for _, line in lines]

    def flush(self) -> Iterator[RankLines]:
        """Yield everything that is to be shown of what is held."""
        yield from self.due(float("inf"))

    def _taken(self, now_s: float) -> Iterator[tuple[int, RankLine]]:
        while self._held and (now_s - self._held[0][0] >= self._hold_s or self._chars > MAX_HELD_CHARS):
            _, rank, line = self._held.popleft()
            self._chars -= len(line.text)
            if self._first.setdefault(hash(line), rank) == rank:
                yield rank, line


class TracebackFilter(AllLines):
    """Replaces a traceback that another rank has printed already by its last line, for runs that are not grouped."""

    def __init__(self) -> None:
        self._open: dict[int, list[RankLine]] = {}  # rank -> the lines of a traceback whose last line is missing
        self._first: dict[tuple[RankLine, ...], int] = {}  # traceback -> the rank that has printed it first

    def add(self, rank: int, lines: Sequence[RankLine], now_s: float) -> Iterable[RankLines]:
        """Return the lines that are no part of a traceback whose end is missing."""
        shown: list[RankLine] = []
        for line in lines:
            held = self._open.get(rank)
            if held is None:
                if line.text == TRACEBACK:
                    self._open[rank] = [line]
                else:
                    shown.append(line)
                continue
            held.append(line)
            if line.text[:1] in ("", " ") and len(held) < MAX_TRACEBACK_LINES:
                continue  # a frame; the exception is the first line that is not indented
            del self._open[rank]
            if len(self._first) >= MAX_TRACEBACKS:
                self._first.clear()
            first = self._first.setdefault(tuple(held), rank)
            same = RankLine(f"{line.text} (the traceback is that of rank {first})", line.ended)
            shown += held if first == rank else [same]
        return super().add(rank, shown, now_s)

    def flush(self) -> Iterator[RankLines]:
        """Yield everything that is held."""
        while self._open:
            rank, held = self._open.popitem()
            yield rank, held
