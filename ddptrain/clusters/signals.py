"""Ctrl-C and SIGTERM while clusters start and end: everything that was started must be recorded or ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ddptrain.clusters.provider import Tell
from ddptrain.errors import DdptrainError, Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENOUGH = 3  # the user has asked that often: stop waiting for anything


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """During the block, a signal raises Interrupted; ignored signals stay ignored.

    An exception that a library raises because of it becomes Interrupted as well: the signal may arrive anywhere, for
    example while a thread is being started.
    """
    with _handled_by(_interrupt):
        try:
            yield
        except DdptrainError:
            raise
        except Exception as error:
            if interrupted := _beneath(error):
                raise interrupted from error
            raise


@contextlib.contextmanager
def deferred(*, breakable: bool = False) -> Iterator[Deferral]:
    """Delay signals until the block ends; then the previous handlers get them.

    If it is `breakable`, a second signal is not delayed. The third signal ends the process.
    """
    deferral = Deferral(breakable)
    with _handled_by(deferral.take) as handlers:
        deferral.handlers = handlers
        try:
            yield deferral
        finally:
            deferral.deliver()


class Deferral:
    """The delayed signals."""

    def __init__(self, breakable: bool) -> None:
        self.handlers: dict[int, Any] = {}
        self._breakable = breakable
        self._waiting: list[int] = []
        self._count = 0

    def take(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: delay it."""
        self._count += 1
        self._waiting.append(signum)
        if self._count >= _ENOUGH:
            os._exit(128 + signum)
        if self._breakable and self._count > 1:
            self.deliver()

    def deliver(self) -> None:
        """Pass the delayed signals to the previous handlers, which may raise."""
        while self._waiting:
            signum = self._waiting.pop(0)
            handler = self.handlers[signum]
            if callable(handler):
                handler(signum, None)
            else:
                signal.signal(signum, handler)
                signal.raise_signal(signum)

    def checked(self, tell: Tell) -> Tell:
        """Return a `tell` that also delivers the delayed signals."""

        def telling(text: str) -> None:
            tell(text)
            self.deliver()

        return telling


def _beneath(error: BaseException) -> Interrupted | None:
    """Return the Interrupted that caused another exception, or None."""
    seen: set[int] = set()
    below: BaseException | None = error
    while below is not None and id(below) not in seen:
        if isinstance(below, Interrupted):
            return below
        seen.add(id(below))
        below = below.__cause__ or below.__context__
    return None


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
