"""Counts the calls of ctx methods that all ranks must make, and reports when this rank waits for others in a call.

A rank that waits in such a call cannot know whether the other ranks are slow or will never make the call. It reports
that it waits; the driver then requests the stacks and counts of all ranks (see driver/failure/missing_calls.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.checkpoint.coordination import WorkerGroupStore
from ddptrain.rank.emitter import Emitter

FIRST_REPORT_S = 2.0  # from the start of a wait to its first report; each further interval is twice as long
_MAX_INTERVAL_S = 60.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that may wait; `for_others` says whether it waits for other ranks now, and not for a disk."""

    name: str
    step: int | None
    since: float
    for_others: Callable[[], bool]


class CollectiveCalls:
    """Counts the calls of one rank by the name of the method."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec, self._emitter = spec, emitter
        self._counts: Counter[str] = Counter()
        self.current: Wait | None = None  # the innermost block
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> dict[str, float]:
        """The number of calls that have begun, by method."""
        return dict(self._counts)

    @property
    def wait(self) -> Wait | None:
        """The call in which the rank waits for other ranks now; None if it does not wait."""
        wait = self.current
        return wait if wait is not None and wait.for_others() else None

    def enter(self, name: str) -> int:
        """Count a call. Return its number, from 1."""
        self._counts[name] += 1
        return self._counts[name]

    def waiting(
        self, name: str, step: int | None = None, for_others: Callable[[], bool] = lambda: True
    ) -> AbstractContextManager[None]:
        """Return a context manager for a block in which the rank may wait for other ranks, in a call that it has
        entered.
        """
        if self._thread is None and self._spec.placement.world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="ddptrain-calls", daemon=True)
            self._thread.start()
        return _Waiting(self, Wait(name, step, time.monotonic(), for_others))

    def meet(self, name: str, number: int, store: WorkerGroupStore) -> None:
        """Wait until all ranks have begun their call of this name and number."""
        if self._spec.placement.world_size == 1:
            return
        store.set(f"met/{name}/{number}/{self._spec.rank}", "")
        with self.waiting(name):
            store.wait([f"met/{name}/{number}/{rank}" for rank in range(self._spec.placement.world_size)])

    def _watch(self) -> None:
        reported, next_s = None, FIRST_REPORT_S
        while True:
            time.sleep(_POLL_S)
            wait = self.wait
            if wait is None:
                continue
            if wait is not reported:
                reported, next_s = wait, FIRST_REPORT_S
            if (waited_s := time.monotonic() - wait.since) >= next_s:
                next_s = waited_s + min(waited_s, _MAX_INTERVAL_S)
                self._emitter.emit(events.Waiting(time.time_ns(), wait.name, wait.step))


class _Waiting(AbstractContextManager[None]):
    """A block in which a rank may wait.

    A class is faster than a generator: ctx.checkpoint may be called in each step.
    """

    __slots__ = ("_before", "_calls", "_wait")

    def __init__(self, calls: CollectiveCalls, wait: Wait) -> None:
        self._calls, self._wait = calls, wait

    def __enter__(self) -> None:
        self._before, self._calls.current = self._calls.current, self._wait

    def __exit__(self, *_: object) -> None:
        self._calls.current = self._before
