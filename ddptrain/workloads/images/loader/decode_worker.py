"""One decode process as its rank sees it: started, given orders, and heard until it has ended."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ddptrain.workloads.images.loader.decode_process import Setup
from ddptrain.workloads.images.loader.pipeline import Answer, Order

AHEAD = 8  # orders of a decoder beyond those that are being read
_END_S = 2.0
# The rank's search path, for its code may have come along from another host; nothing of the working folder's.
_PROGRAM = (
    "import json, sys; orders = sys.stdin.buffer; sys.path[:] = json.loads(orders.readline()); "
    "from ddptrain.workloads.images.loader.decode_process import main; main(orders)"
)
# Pillow and obstore have threads of their own, or none.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Decoder:
    """A process, and the thread that hears it; all else is done by one thread.

    `tell` gets its answers, and `ended` is called last, when the process is gone and writes to no slot any more.
    """

    def __init__(
        self, setup: Setup, tell: Callable[[Sequence[Answer]], None], ended: Callable[[Decoder], None]
    ) -> None:
        self.in_hand: dict[int, Order] = {}  # ticket -> order
        self.alone: Order | None = None  # the only one that it has been told, of all that are in hand
        self.has_begun = self.has_answered = False
        self.how = ""  # it has ended
        self._most = setup.readers + AHEAD
        self._suspects: deque[Order] = deque()
        self._others: list[Order] = []
        self._unsent: list[Order] = []
        self._tell, self._ended = tell, ended
        answers, answers_fd = os.pipe()
        self._answers = os.fdopen(answers, "rb")
        try:
            self.popen = _start([setup.pixels_fd, answers_fd])
        except OSError:
            self._answers.close()
            raise
        finally:
            os.close(answers_fd)
        self._send(sys.path)
        self._send(dataclasses.asdict(dataclasses.replace(setup, answers_fd=answers_fd)))
        self._thread = threading.Thread(target=self._hear, name="ddptrain-images", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """How many orders it would take."""
        return 0 if self.alone is not None else self._most - len(self.in_hand)

    def put(self, order: Order) -> None:
        """Have an order ready for it."""
        self.in_hand[order.ticket] = order
        self._unsent.append(order)

    def take_over(self, suspects: Iterable[Order], others: Iterable[Order]) -> None:
        """Have the orders of another one ready: first the suspects, each of them alone, then the others."""
        self._suspects.extend(suspects)
        self._others = [*others]
        self.in_hand |= {order.ticket: order for order in [*self._suspects, *self._others]}
        self._go_on()

    def answered(self, ticket: int) -> None:
        """It has one order less."""
        del self.in_hand[ticket]
        self.has_answered = True
        if self.alone is not None:
            self._go_on()

    def flush(self) -> None:
        """Send it the orders that are ready."""
        if self._unsent:
            self._send([_told(order) for order in self._unsent])
            self._unsent.clear()

    def hang_up(self) -> None:
        """Tell it to end."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.close()
        except OSError:
            pass

    def join(self) -> None:
        """Wait until it has ended; kill it if it doesn't."""
        self._wait()
        self._thread.join()
        self._answers.close()

    def _go_on(self) -> None:
        self.alone = self._suspects.popleft() if self._suspects else None
        if self.alone is not None:
            self._unsent.append(self.alone)
        else:
            self._unsent += self._others
            self._others = []

    def _send(self, what: object) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(what).encode() + b"\n")
            self.popen.stdin.flush()
        except (OSError, ValueError):
            pass  # it is gone: whoever hears it tells

    def _hear(self) -> None:
        for line in self._answers:
            if line.endswith(b"\n"):  # else it was killed in the middle of it
                self.has_begun = True
                self._tell([Answer(*item) if isinstance(item, list) else Answer(item) for item in json.loads(line)])
        self.how = self._wait()
        self._ended(self)

    def _wait(self) -> str:
        """How it has ended; nobody writes to its slots afterwards, also where it would not have ended by itself."""
        try:
            status = self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            return "did not answer any more, and was ended"
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def _told(order: Order) -> list[object]:
    return [order.ticket, order.slot, dataclasses.astuple(order.wanted), order.seed]


def _start(fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """A decode process, which does not hear the signals of its group from its first moment on."""
    deaf_to = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf_to)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, **_ENVIRONMENT},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
