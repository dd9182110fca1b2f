"""Which lines of ranks are shown: all of them, or of many ranks those of rank 0 and what differs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from ddptrain.results.log_tail import LogLine

HOLD_S = 0.4  # how long a line of another rank waits for the same line of rank 0; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
MAX_KNOWN = 100_000  # lines; after that, equal lines may be shown again


class ShownLines:
    """Passes on all lines of rank 0, and each line of other ranks that no rank before has printed.

    The lines of each rank keep their order. A line that a rank repeats is shown again, unless another rank was first.
    """

    def __init__(self, *, groups: bool = False) -> None:
        """Without `groups`, all lines of all ranks are passed on at once."""
        self.groups = groups
        self._first: dict[int, int] = {}  # hash of a line -> the rank that has printed it first, or 0
        self._held: deque[tuple[float, int, LogLine]] = deque()
        self._chars = 0

    def add(self, rank: int, lines: Sequence[LogLine], now_s: float) -> Sequence[LogLine]:
        """Add lines that a rank has printed, at a monotonic time in seconds; return those to show now."""
        if not self.groups:
            return lines
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

    def _taken(self, now_s: float) -> Iterator[tuple[int, LogLine]]:
        while self._held and (now_s - self._held[0][0] >= HOLD_S or self._chars > MAX_HELD_CHARS):
            _, rank, line = self._held.popleft()
            self._chars -= len(line.text)
            if self._first.setdefault(hash(line), rank) == rank:
                yield rank, line
