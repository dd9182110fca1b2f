"""Which lines of ranks are shown: of many ranks those of rank 0 and what differs, and equal tracebacks once."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence

from ddptrain.results.log_tail import LogLine

HOLD_S = 0.4  # how long a line of another rank waits for the same line of rank 0; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
MAX_KNOWN = 100_000  # lines; after that, equal lines may be shown again
TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES, MAX_TRACEBACKS = 1000, 100


class ShownLines:
    """Passes on all lines, but of a traceback that another rank has printed before only the last one.

    With `groups` those of rank 0, and each line of other ranks that no rank before has printed. The lines of each rank
    keep their order. A line that a rank repeats is shown again, unless another rank was first.
    """

    def __init__(self, *, groups: bool = False) -> None:
        self.groups = groups
        self._open: dict[int, list[LogLine]] = {}  # rank -> a traceback whose last line is missing
        self._tracebacks: dict[tuple[LogLine, ...], int] = {}  # the rank that has printed it first
        self._first: dict[int, int] = {}  # hash of a line -> the rank that has printed it first, or 0
        self._held: deque[tuple[float, int, LogLine]] = deque()
        self._chars = 0

    def add(self, rank: int, lines: Sequence[LogLine], now_s: float) -> Sequence[LogLine]:
        """Add lines that a rank has printed, at a monotonic time in seconds; return those to show now."""
        if not self.groups:
            return [shown for line in lines for shown in self._in_traceback(rank, line)]
        if len(self._first) > MAX_KNOWN:
            self._first.clear()
        if rank == 0:
            self._first.update((hash(line), 0) for line in lines)
            return lines
        self._held.extend((now_s, rank, line) for line in lines)
        self._chars += sum(len(line.text) for line in lines)
        return ()

    def due(self, now_s: float) -> Iterator[tuple[int, Sequence[LogLine]]]:
        """Yield ranks and the lines to show of those that were held long enough; at infinity of all."""
        for rank, lines in itertools.groupby(self._taken(now_s), lambda item: item[0]):
            yield rank, [line for _, line in lines]
        while self._open and now_s == math.inf:
            yield self._open.popitem()

    def _in_traceback(self, rank: int, line: LogLine) -> Sequence[LogLine]:
        """Hold a traceback until its last line, the exception: the first line that is not indented."""
        if (held := self._open.get(rank)) is None:
            if line.text != TRACEBACK:
                return (line,)
            self._open[rank] = [line]
            return ()
        held.append(line)
        if line.text[:1] in ("", " ") and len(held) < MAX_TRACEBACK_LINES:
            return ()
        del self._open[rank]
        if len(self._tracebacks) >= MAX_TRACEBACKS:
            self._tracebacks.clear()
        first = self._tracebacks.setdefault(tuple(held), rank)
        return held if first == rank else [LogLine(f"{line.text} (the traceback is that of rank {first})", line.ended)]

    def _taken(self, now_s: float) -> Iterator[tuple[int, LogLine]]:
        while self._held and (now_s - self._held[0][0] >= HOLD_S or self._chars > MAX_HELD_CHARS):
            _, rank, line = self._held.popleft()
            self._chars -= len(line.text)
            if self._first.setdefault(hash(line), rank) == rank:
                yield rank, line
