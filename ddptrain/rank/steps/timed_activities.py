"""Measures activities of a rank other than training steps, for the line `time` at the end of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.rank_identity import RankIdentity

_MIN_S = 0.01  # shorter activities are not recorded, because ctx.checkpoint may be called after each step


class OtherTime:
    """Sums up the time of this process without training: checkpoints, evaluations, calls that wait for other ranks.

    `with other_time:` adds the duration of a block in the main thread. A block inside a block counts once.

    A class takes a third of the time of a generator, and ctx.checkpoint may be called after each step.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0
        self._began = 0.0

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return  # training continues meanwhile
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth:
            self.total_s += time.perf_counter() - self._began


other_time = OtherTime()  # of this process


class TimedActivities(RankIdentity):
    """The part of a rank's context that measures activities; rank 0 reports them."""

    _emitter: Emitter

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Measure the time of a block: `with ctx.timed("evaluation"):`. The line `time` of the run shows "evaluation".

        Every rank may use it. Times of rank 0 of at least 0.01 s are recorded in events.jsonl.
        """
        began = time.monotonic()
        try:
            with other_time:
                yield
        finally:
            seconds = time.monotonic() - began
            if self.rank == 0 and seconds >= _MIN_S:
                with suppress(OSError):  # the disk is full: an exception of the block is more important
                    self._emitter.emit(events.Timed(time.time_ns(), activity, seconds))
