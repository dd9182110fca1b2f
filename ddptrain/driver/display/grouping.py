"""Merges equal lines that several ranks print at nearly the same time. Pure functions: the time is an argument.

[rank 0] epoch 1/20   [rank 1] epoch 1/20   [rank 2] epoch 1/20   ->   [ranks 0-2] epoch 1/20
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddptrain.driver.display.log_tail import RankLine
from ddptrain.driver.failure.fault import format_ranks

MIN_RANKS = 17  # the smallest run whose ranks are shown as a group
HOLD_S = 0.4  # how long a line waits for the same line of other ranks; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES, MAX_TRACEBACKS = 1000, 100
_MAX_LABEL_CHARS = 40


@dataclass
class _Group:
    line: RankLine
    since_s: float
    ranks: set[int] = field(default_factory=set)


class LineGrouper:
    """Holds lines back for a short time and merges equal ones. The lines of each rank keep their order."""

    def __init__(self, world_size: int, hold_s: float = HOLD_S) -> None:
        self._world_size, self._hold_s = world_size, hold_s
        self._held: dict[int, _Group] = {}  # by number, in the order in which they are shown
        self._numbers: dict[RankLine, list[int]] = {}  # line -> the groups that hold it, in their order
        self._last_of: dict[int, int] = {}  # rank -> the last group that holds a line of it
        self._count = self._chars = 0

    def add(self, rank: int, lines: Sequence[RankLine], now_s: float) -> None:
        """Add lines that a rank has printed, at a monotonic time in seconds."""
        for line in lines:
            # The line's group must come after the groups of the rank's earlier lines, which are shown first.
            numbers = self._numbers.setdefault(line, [])
            index = bisect_right(numbers, self._last_of.get(rank, -1))
            if index == len(numbers):
                numbers.append(self._new_group(line, now_s))
            self._held[numbers[index]].ranks.add(rank)
            self._last_of[rank] = numbers[index]

    def due(self, now_s: float) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield the lines that all ranks have printed, or that were held long enough."""
        yield from _runs(self._taken(now_s))

    def flush(self) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield everything that is held."""
        yield from _runs(self._taken(float("inf")))

    def _new_group(self, line: RankLine, now_s: float) -> int:
        self._count += 1
        self._held[self._count] = _Group(line, now_s)
        self._chars += len(line.text)
        return self._count

    def _taken(self, now_s: float) -> Iterator[_Group]:
        """Remove the first groups while they need not wait; the order of all groups is kept."""
        for number in list(self._held):
            group = self._held[number]
            is_complete = len(group.ranks) >= self._world_size
            if not (is_complete or now_s - group.since_s >= self._hold_s or self._chars > MAX_HELD_CHARS):
                return
            del self._held[number]
            self._chars -= len(group.line.text)
            numbers = self._numbers[group.line]
            del numbers[0]
            if not numbers:
                del self._numbers[group.line]
            yield group


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


def _runs(groups: Iterator[_Group]) -> Iterator[tuple[list[int], list[RankLine]]]:
    """Put consecutive lines of the same ranks together."""
    ranks: set[int] = set()
    lines: list[RankLine] = []
    for group in groups:
        if lines and group.ranks != ranks:
            yield sorted(ranks), lines
            lines = []
        ranks = group.ranks
        lines.append(group.line)
    if lines:
        yield sorted(ranks), lines


def label(ranks: Sequence[int]) -> str:
    """Return the prefix of a line: "[rank 3]", "[ranks 0-63]", or "[32 ranks: 0, 2, ...]" if it would be too long."""
    if len(ranks) == 1:
        return f"[rank {ranks[0]}]"
    numbers = format_ranks(ranks)
    if len(numbers) <= _MAX_LABEL_CHARS:
        return f"[ranks {numbers}]"
    shown = numbers[: _MAX_LABEL_CHARS - len("...")].rpartition(", ")[0]
    return f"[{len(ranks)} ranks: {shown}, ...]"
