"""Leaves out lines that another rank has printed as well. Pure functions: the time is an argument."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from ddptrain.driver.display.log_tail import RankLine

MIN_RANKS = 17  # from this number of ranks on, the display shows rank 0, and what other ranks print besides
HOLD_S = 0.4  # how long a line of another rank waits for the same line of rank 0; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
MAX_KNOWN = 100_000  # lines; after that, equal lines may be shown again
TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES, MAX_TRACEBACKS = 1000, 100


class DifferingLines:
    """Passes on all lines of rank 0, and each line of other ranks that no rank before has printed.

    The lines of each rank keep their order. A line that a rank repeats is shown again, unless another rank was first.
    """

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._first: dict[int, int] = {}  # hash of a line -> the rank that has printed it first, or 0
        self._of_first: list[RankLine] = []
        self._held: deque[tuple[float, int, RankLine]] = deque()
        self._chars = 0

    def add(self, rank: int, lines: Sequence[RankLine], now_s: float) -> None:
        """Add lines that a rank has printed, at a monotonic time in seconds."""
        if len(self._first) > MAX_KNOWN:
            self._first.clear()
        if rank == 0:
            self._of_first += lines
            self._first.update((hash(line), 0) for line in lines)
            return
        self._held.extend((now_s, rank, line) for line in lines)
        self._chars += sum(len(line.text) for line in lines)

    def due(self, now_s: float) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield the lines to show of those that were held long enough."""
        if self._of_first:
            yield [0], self._of_first
            self._of_first = []
        for rank, lines in itertools.groupby(self._taken(now_s), lambda item: item[0]):
            yield [rank], [line for _, line in lines]

    def flush(self) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield everything that is to be shown of what is held."""
        yield from self.due(float("inf"))

    def _taken(self, now_s: float) -> Iterator[tuple[int, RankLine]]:
        while self._held and (now_s - self._held[0][0] >= self._hold_s or self._chars > MAX_HELD_CHARS):
            _, rank, line = self._held.popleft()
            self._chars -= len(line.text)
            if self._first.setdefault(hash(line), rank) == rank:
                yield rank, line


class TracebackFilter:
    """Replaces a traceback that another rank has printed already by its last line, for runs that are not grouped."""

    def __init__(self) -> None:
        self._open: dict[int, list[RankLine]] = {}  # rank -> the lines of a traceback whose last line is missing
        self._first: dict[tuple[RankLine, ...], int] = {}  # traceback -> the rank that has printed it first

    def add(self, rank: int, lines: Sequence[RankLine]) -> list[RankLine]:
        """Return the lines to show of those that a rank has printed."""
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
        return shown

    def flush(self) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield everything that is held."""
        while self._open:
            rank, held = self._open.popitem()
            yield [rank], held
