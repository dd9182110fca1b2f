"""Measures activities of a rank other than training steps, for the line `time` at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.rank_identity import RankIdentity

_MIN_S = 0.01  # shorter activities are not recorded, because ctx.checkpoint may be called after each step


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
            yield
        finally:
            seconds = time.monotonic() - began
            if self.rank == 0 and seconds >= _MIN_S:
                with suppress(OSError):  # the disk is full: an exception of the block is more important
                    self._emitter.emit(events.Timed(time.time_ns(), activity, seconds))
