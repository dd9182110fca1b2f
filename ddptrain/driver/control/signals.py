"""Converts signals to requests to the driver's main loop while a run is active.

The first that asks to end lets the ranks save, the second stops them, the third kills them, and a fourth ends this
process at once. `ddptrain stop --now` kills them with the first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from ddptrain.driver.inbox import Inbox, Request, SignalReceived
from ddptrain.errors import Interrupted
from ddptrain.protocol.commands import FORWARDED

REQUESTS: dict[int, Request] = {
    signal.SIGINT: Request.END,
    signal.SIGTERM: Request.END,
    signal.SIGHUP: Request.END,
    signal.SIGQUIT: Request.END,
    **dict.fromkeys(FORWARDED, Request.FORWARD),
}
MOST = 3  # signals that the run handles


class Signals:
    """A signal handler: each signal becomes a request. One that asks to end is also an exception in `interrupting()`.

    taken: the signals that ask to end. asked: `ddptrain stop` has sent the first of them. now: `ddptrain stop --now`.
    breaks: the next SIGINT opens the debugger; one that follows before the debugger has asked for a line ends the run.
    """

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.taken: list[int] = []
        self.asked = self.now = self.breaks = False
        self._interrupts = False

    def take(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal; installed with signal.signal()."""
        if (request := REQUESTS[signum]) is Request.FORWARD:
            self.inbox.put(SignalReceived(signum, request))
            return
        if signum == signal.SIGINT and self.breaks and not self.now:
            self.breaks = False
            self.inbox.put(SignalReceived(signum, Request.BREAK))
            return
        self.taken.append(signum)
        if len(self.taken) > MOST:  # it does not get to its end
            os._exit(128 + signum)
        self.inbox.put(self._request(signum))
        if self._interrupts:
            self._interrupts = False
            raise Interrupted(signum)

    def _request(self, signum: int) -> SignalReceived:
        return SignalReceived(signum, Request.STOP_NOW if self.now else Request.END)

    def send(self, signum: int) -> None:
        """Send the run a signal, from any thread."""
        os.kill(os.getpid(), signum)

    def check(self) -> None:
        """Raise Interrupted if a signal was received. Loops that wait call this."""
        if self.taken:
            raise Interrupted(self.taken[0])

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Interrupted at a signal."""
        with self.interrupting():
            time.sleep(seconds)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal, also an earlier one, end the block with Interrupted. For blocks that only wait.

        Do not import within such a block: an interrupted import leaves a broken module.
        """
        self._interrupts = True  # first: a signal between these two lines must not be missed
        try:
            self.check()
            yield
        finally:
            self._interrupts = False


class ThreadSignals(Signals):
    """The signals of a run that runs in a thread, beside other runs: `send` delivers a signal only to this run.

    `interrupting()` raises no exception; code that waits there calls `check` or `pause`.
    """

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(inbox)
        self._sent = threading.Event()

    def send(self, signum: int) -> None:
        """Deliver a signal to this run."""
        self.taken.append(signum)
        self._sent.set()
        self.inbox.put(self._request(signum))

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Interrupted at a signal."""
        self._sent.wait(seconds)
        self.check()


@contextlib.contextmanager
def signals_to(inbox: Inbox, *, passes_on: bool = False) -> Iterator[Signals]:
    """Handle signals with the yielded object until the block ends, then restore the former handlers.

    passes_on: also those that the ranks get. Others have their usual effect.
    Ignored signals stay ignored (nohup, background jobs of a shell). Within another such block, a signal that the outer
    object has already received is sent again, because it has not been handled yet.
    """
    taken = Signals(inbox)
    wanted = [number for number, request in REQUESTS.items() if passes_on or request is not Request.FORWARD]
    numbers = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, taken.take) for number in numbers}
    outer = getattr(before.get(signal.SIGTERM), "__self__", None)
    if isinstance(outer, Signals) and outer.taken:
        os.kill(os.getpid(), outer.taken[0])
    try:
        yield taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
