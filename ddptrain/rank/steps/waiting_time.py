"""Sums up how long rank 0 waits for data, and reports this for the line `time` of the run."""

from __future__ import annotations

import functools
import threading
import time
from contextlib import suppress
from typing import Any

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter

_EVERY_S = 10.0  # from one report to the next
_MIN_S = 0.01


class WaitingTime:
    """Sums up the waits of this process for data; reports them, and the first step, as timed activities."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._seconds = 0.0
        self._began = self._reported_at = time.monotonic()

    def add(self, seconds: float) -> None:
        """Add a wait for data that has just ended."""
        self._seconds += seconds
        if time.monotonic() - self._reported_at >= _EVERY_S:
            self.flush()

    def first_step(self) -> None:
        """Report the time until the end of the first step, which has just ended. It includes compilation."""
        self._emit("first step", time.monotonic() - self._began)

    def flush(self) -> None:
        """Report the waits since the last report."""
        self._reported_at = time.monotonic()
        self._emit("data", self._seconds)
        self._seconds = 0.0

    def _emit(self, name: str, seconds: float) -> None:
        if seconds >= _MIN_S:
            with suppress(OSError):  # the disk is full; the workload gets an error, too
                self._emitter.emit(events.Timed(time.time_ns(), name, seconds))


def measure_data(waiting: WaitingTime) -> None:
    """Measure how long the main thread waits for each batch of torch's DataLoaders, also in scripts."""
    from torch.utils.data import dataloader

    base: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None:  # another version of torch: the wait counts as training
        return
    next_batch = base.__next__

    @functools.wraps(next_batch)
    def measured(self: Any) -> Any:
        began = time.monotonic()
        try:
            return next_batch(self)
        finally:
            if threading.get_ident() == threading.main_thread().ident:
                waiting.add(time.monotonic() - began)

    base.__next__ = measured
