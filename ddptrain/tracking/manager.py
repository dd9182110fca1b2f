"""A rank's trackers: what is logged goes to all of them, and none of them ever holds up training, or another."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddptrain.tracking.items import Checkpoint, Image, Item, Table
from ddptrain.tracking.protocol import State
from ddptrain.tracking.temp_files import Lending, Loan
from ddptrain.tracking.tracker_thread import Emit, Lane, Wanted


class Hub:
    """Hands items to trackers, each in a thread of its own; of a forked child it takes nothing.

    `emit` tells what the person should know; `lending` is a folder of this rank's, for files that trackers read.
    """

    def __init__(
        self, wanted: Sequence[Wanted], emit: Emit, lending: Path, *, queue: int = 10_000, strict: bool = False
    ) -> None:
        self._pid = os.getpid()
        self._strict = strict
        self._lanes = [Lane(each, emit, limit=queue, strict=strict) for each in wanted]
        self._lending = Lending(lending)
        self.ended = False
        self._finishing = threading.Lock()
        self.left_behind: list[str] = []  # trackers that have not ended in time
        for lane in self._lanes:
            lane.begin()

    @property
    def error(self) -> str:
        """What makes the rank fail: the first thing that went wrong, where the configuration is strict about it."""
        errors = [f"{lane.name}: {lane.error}" for lane in self._lanes if lane.error]
        return errors[0] if errors and self._strict else ""

    def wants(self, kind: type[Item]) -> bool:
        """Whether any tracker takes items of that type."""
        return self._is_open() and any(lane.wants(kind) for lane in self._lanes)

    def put(self, item: Item) -> None:
        """Hand an item to every tracker. Never waits, never raises."""
        if self.ended or os.getpid() != self._pid:
            return
        for lane in self._lanes:
            if lane.wants(type(item)):
                lane.put(item)

    def lend(self, path: Path, suffix: str = "") -> Path:
        """A name, with that suffix, for a file, or a folder of files: it stays when the driver takes the file away.

        Raises OSError.
        """
        return self._lending.tree(path) if path.is_dir() else self._lending.file(path, suffix)

    def put_lent(self, item: Image | Table | Checkpoint, *lent: Path) -> None:
        """Hand over an item whose files were lent: they go when all trackers have taken it."""
        lanes = [lane for lane in self._lanes if lane.wants(type(item))] if self._is_open() else []
        loan = Loan(lent, len(lanes))
        for lane in lanes:
            lane.put(item, loan)
        if not lanes:
            loan.back()

    def end(self, state: State, within_s: float = 3600.0) -> float:
        """Have the trackers finish, from now on; returns the seconds that the slowest may take. The first state counts.

        Each has its own time-out, and no more than `within_s`.
        """
        if os.getpid() != self._pid:
            return 0.0
        self.ended = True
        return max((lane.end(state, within_s) for lane in self._lanes), default=0.0)

    def wait(self) -> None:
        """Wait until the trackers have finished, or their time is over; after end()."""
        if os.getpid() != self._pid:
            return
        with self._finishing:  # the main thread, and the one that hears that the gang is stopped
            if not self.left_behind:
                self.left_behind = [lane.name for lane in self._lanes if not lane.over()]
            with suppress(OSError):
                self._lending.close()

    def _is_open(self) -> bool:
        return not self.ended and os.getpid() == self._pid
