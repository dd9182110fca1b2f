"""Ctrl-C and SIGTERM while clusters start and end: everything that was started must be recorded or ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ddptrain.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENOUGH = 3  # the user has asked that often: stop waiting for anything


def interruptible() -> contextlib.AbstractContextManager[object]:
    """During the block, a signal raises Interrupted; ignored signals stay ignored."""
    return _handled_by(_interrupt)


@contextlib.contextmanager
def deferred(*, breakable: bool = False) -> Iterator[Callable[[], None]]:
    """Delay signals until the block ends or calls the yielded function; then the previous handlers get them.

    If it is `breakable`, a second signal is not delayed. The third signal ends the process.
    """
    waiting: list[int] = []
    count = 0

    def take(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        waiting.append(signum)
        if count >= _ENOUGH:
            os._exit(128 + signum)
        if breakable and count > 1:
            deliver()

    def deliver() -> None:
        while waiting:
            signum = waiting.pop(0)
            handler = before[signum]
            if callable(handler):
                handler(signum, None)
            else:
                signal.signal(signum, handler)
                signal.raise_signal(signum)

    with _handled_by(take) as before:
        try:
            yield deliver
        finally:
            deliver()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum)


@contextlib.contextmanager
def _handled_by(handler: Any) -> Iterator[dict[int, Any]]:
    """During the block, signals go to `handler`; yields the previous handlers. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    numbers = [number for number in _SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, old in before.items():
            signal.signal(number, old)
