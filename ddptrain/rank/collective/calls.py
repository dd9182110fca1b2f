"""Counts the calls of ctx methods that all ranks must make, and tells the driver when this rank waits in one.

A rank that waits for others in such a call can't know whether they are slow or will never come. It says that it waits;
the driver asks all ranks where they are and compares their counts (see driver/uncalled.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.checkpoint.coordination import GangStore
from ddptrain.rank.emitter import Emitter

FIRST_S = 2.0  # in a call, before the driver is told
_LONGEST_S = 60.0  # from one word to the next; each takes twice as long as the one before
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that the rank is in; `for_others` says whether it waits for other ranks there, not for a disk."""

    name: str
    step: int | None
    since: float
    for_others: Callable[[], bool]


class GangCalls:
    """The calls of one rank, by the name of the method."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec, self._emitter = spec, emitter
        self._counts: Counter[str] = Counter()
        self._wait: Wait | None = None
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> dict[str, float]:
        """How many calls have begun, by name."""
        return dict(self._counts)

    @property
    def wait(self) -> Wait | None:
        """The call in which the rank waits for others now."""
        wait = self._wait
        return wait if wait is not None and wait.for_others() else None

    def enter(self, name: str) -> int:
        """The number of the call of that method that begins now, from 1."""
        self._counts[name] += 1
        return self._counts[name]

    @contextmanager
    def waiting(
        self, name: str, step: int | None = None, for_others: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Within the block the rank may wait for others, in a call that it has entered."""
        before, self._wait = self._wait, Wait(name, step, time.monotonic(), for_others)
        if self._thread is None and self._spec.placement.world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="ddptrain-gang-calls", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._wait = before

    def meet(self, name: str, number: int, store: GangStore) -> None:
        """Wait until all ranks have come to their call of that name and number."""
        store.set(f"met/{name}/{number}/{self._spec.rank}", "")
        with self.waiting(name):
            store.wait([f"met/{name}/{number}/{rank}" for rank in range(self._spec.placement.world_size)])

    def _watch(self) -> None:
        told, next_s = None, FIRST_S
        while True:
            time.sleep(_LOOK_S)
            wait = self.wait
            if wait is None:
                continue
            if wait is not told:
                told, next_s = wait, FIRST_S
            if (waited_s := time.monotonic() - wait.since) >= next_s:
                next_s = waited_s + min(waited_s, _LONGEST_S)
                self._emitter.emit(events.Waiting(time.time_ns(), wait.name, wait.step))
