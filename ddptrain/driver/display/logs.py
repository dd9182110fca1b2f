"""Which lines of ranks are shown: of many ranks those of rank 0 and what differs, equal tracebacks once."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ddptrain.results.log_tail import LogLine

HOLD_S = 0.4  # how long a line of another rank waits for the same line of rank 0; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
MAX_KNOWN = 100_000  # lines; after that, equal lines may be shown again
TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES, MAX_TRACEBACKS = 1000, 100

RankLines = tuple[int, Sequence[LogLine]]  # a rank, and lines that it has printed


class AllLines:
    """Passes on all lines of all ranks."""

    only_bar_of: int | None = None  # the rank whose redrawn line is shown; None: of each rank

    def add(self, rank: int, lines: Sequence[LogLine], now_s: float) -> Iterable[RankLines]:
        """Add lines that a rank has printed, at a monotonic time in seconds; return what can be shown now."""
        return [(rank, lines)] if lines else []

    def due(self, now_s: float) -> Iterable[RankLines]:
        """Return what was held long enough; at infinity everything that is held."""
        return ()


class DifferingLines(AllLines):
    """Passes on all lines of rank 0, and each line of other ranks that no rank before has printed.

    The lines of each rank keep their order. A line that a rank repeats is shown again, unless another rank was first.
    """

    only_bar_of = 0

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # hash of a line -> the rank that has printed it first, or 0
        self._held: deque[tuple[float, int, LogLine]] = deque()
        self._chars = 0

    def add(self, rank: int, lines: Sequence[LogLine], now_s: float) -> Iterable[RankLines]:
        """Return the lines of rank 0; hold those of the others."""
        if len(self._first) > MAX_KNOWN:
            self._first.clear()
        if rank == 0:
            self._first.update((hash(line), 0) for line in lines)
            return super().add(rank, lines, now_s)
        self._held.extend((now_s, rank, line) for line in lines)
        self._chars += sum(len(line.text) for line in lines)
        return ()

    def due(self, now_s: float) -> Iterator[RankLines]:
        """Yield the lines to show of those that were held long enough."""
        for rank, lines in itertools.groupby(self._taken(now_s), lambda item: item[0]):
            yield rank, [line for _, line in lines]

    def _taken(self, now_s: float) -> Iterator[tuple[int, LogLine]]:
        while self._held and (now_s - self._held[0][0] >= HOLD_S or self._chars > MAX_HELD_CHARS):
            _, rank, line = self._held.popleft()
            self._chars -= len(line.text)
            if self._first.setdefault(hash(line), rank) == rank:
                yield rank, line


class TracebackFilter(AllLines):
    """Replaces a traceback that another rank has printed already by its last line, for runs that are not grouped."""

    def __init__(self) -> None:
        self._open: dict[int, list[LogLine]] = {}  # rank -> the lines of a traceback whose last line is missing
        self._first: dict[tuple[LogLine, ...], int] = {}  # traceback -> the rank that has printed it first

    def add(self, rank: int, lines: Sequence[LogLine], now_s: float) -> Iterable[RankLines]:
        """Return the lines that are no part of a traceback whose end is missing."""
        shown: list[LogLine] = []
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
            same = LogLine(f"{line.text} (the traceback is that of rank {first})", line.ended)
            shown += held if first == rank else [same]
        return super().add(rank, shown, now_s)

    def due(self, now_s: float) -> Iterator[RankLines]:
        """Yield at infinity everything that is held."""
        while self._open and now_s == float("inf"):
            yield self._open.popitem()
