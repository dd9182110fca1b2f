"""Measures what a rank does besides training steps, for the line `time` at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.rank_identity import RankIdentity
from ddptrain.rank.steps.non_training_time import other_time

_LEAST_S = 0.01  # shorter ones are not recorded: ctx.checkpoint may be called after each step


class TimedActivities(RankIdentity):
    """The part of a rank's context that measures activities; rank 0 reports them."""

    _emitter: Emitter

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Measure a block, as `with ctx.timed("evaluation"):`. "evaluation" appears in where the time of a run went.

        Every rank may use it; what rank 0 measures is recorded in events.jsonl, if it took at least 0.01 s.
        """
        began = time.monotonic()
        try:
            with other_time:
                yield
        finally:
            seconds = time.monotonic() - began
            if self.rank == 0 and seconds >= _LEAST_S:
                with suppress(OSError):  # the disk is full: what the block raised matters more
                    self._emitter.emit(events.Timed(time.time_ns(), activity, seconds))
