"""The time of this process that is no training: checkpoints, evaluations, and calls that wait for other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class OtherTime:
    """Adds up the blocks of the main thread; a block inside a block counts once."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0

    @contextmanager
    def block(self) -> Iterator[None]:
        """The block is no training."""
        if threading.current_thread() is not threading.main_thread():
            yield  # training goes on meanwhile
            return
        began = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.total_s += time.perf_counter() - began


other_time = OtherTime()  # of this process
