"""SIGINT, SIGTERM and SIGHUP as messages to the driver's main loop, for as long as a run is on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from ddptrain.driver.messages import Inbox, Signalled
from ddptrain.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Takes the signals: each becomes a message, and within `interrupting()` an exception as well."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.taken: list[int] = []
        self.asked = False  # whether the first was sent for `ddptrain stop`
        self._interrupts = False

    def take(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.taken.append(signum)
        if len(self.taken) > 2:  # the person has asked three times: whatever we wait for, stop waiting
            os._exit(128 + signum)
        self.inbox.put(Signalled(signum))
        if self._interrupts:
            self._interrupts = False
            raise Interrupted(signum)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """For blocks that only wait: a signal, also one that came before, ends them with Interrupted.

        Never around imports: a module that was interrupted half-way stays broken.
        """
        if self.taken:
            raise Interrupted(self.taken[0])
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False


@contextlib.contextmanager
def signals_to(inbox: Inbox) -> Iterator[Signals]:
    """Until the block ends, signals go through the yielded object; then the handlers before are back.

    What the caller had ignored stays ignored (nohup, a shell's background job).
    """
    taken = Signals(inbox)
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, taken.take) for number in numbers}
    try:
        yield taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
