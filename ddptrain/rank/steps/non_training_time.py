"""The time of this process without training: checkpoints, evaluations, and calls that wait for other ranks."""

from __future__ import annotations

import threading
import time


class OtherTime:
    """Sums up the durations of blocks in the main thread: `with other_time:`. A block inside a block counts once.

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
