"""The time of this process that is no training: checkpoints, evaluations, and calls that wait for other ranks."""

from __future__ import annotations

import threading
import time


class OtherTime:
    """Adds up the blocks of the main thread: `with other_time:`. A block inside a block counts once.

    ctx.checkpoint may be called after each step, so this is no generator: it takes a third of the time.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0
        self._began = 0.0

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return  # training goes on meanwhile
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
