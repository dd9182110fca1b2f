"""What a running rank is told: one word a line, on a pipe from the rank server, or posted by a signal handler.

    preempt    finish the step, save, and end
    stacks     write down where every thread is
    stop       end: the gang is being stopped (SIGTERM comes as well)

A thread takes them, for the main thread may be inside a collective operation for minutes.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

PREEMPT = "preempt"
STACKS = "stacks"
STOP = "stop"
NOTICED = "noticed"  # never from outside: this process was sent SIGTERM


class Orders:
    """Reads orders from `fd` and calls whoever takes each; the thread ends when the other end of `fd` is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mine_r, self._mine_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._takers: dict[str, Callable[[], None]] = {}

    def on(self, order: str, take: Callable[[], None]) -> None:
        """Call `take`, in the thread, whenever `order` comes; to be said before listen()."""
        self._takers[order] = take

    def post(self, order: str) -> None:
        """Give an order from inside; safe in a signal handler."""
        os.write(self._mine_w, f"{order}\n".encode())

    def listen(self) -> None:
        """Read from now on; what came before is read first."""
        threading.Thread(target=self._read, name="ddptrain-orders", daemon=True).start()

    def _read(self) -> None:
        rests = {self._fd: b"", self._mine_r: b""}
        while True:
            for fd in _readable(*rests):
                data = os.read(fd, 4096)
                if not data:
                    return
                *lines, rests[fd] = (rests[fd] + data).split(b"\n")
                for line in lines:
                    self._take(line.decode("ascii", "replace"))

    def _take(self, order: str) -> None:
        take = self._takers.get(order)
        if take is not None:
            take()


def _readable(*fds: int) -> list[int]:
    """Those of `fds` that have something to read, once one has."""
    poll = select.poll()  # select.select() takes no descriptor above 1023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll()]
