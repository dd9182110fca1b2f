"""Who decodes for a rank: processes of their own, which share memory with it, or threads of the rank."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ddptrain.errors import TrainingFailed
from ddptrain.workloads.images.decodeprocess import Setup
from ddptrain.workloads.images.pipeline import Answer, Order, Pipeline

AHEAD = 8  # orders of a decoder beyond those that are being read
_END_S = 2.0
# The rank's search path, for its code may have come along from another host; nothing of the working folder's.
_PROGRAM = (
    "import json, sys; orders = sys.stdin.buffer; sys.path[:] = json.loads(orders.readline()); "
    "from ddptrain.workloads.images.decodeprocess import main; main(orders)"
)
# Pillow and obstore have threads of their own, or none.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Tell = Callable[[Sequence[Answer] | Exception], None]


class DecodeProcessLost(TrainingFailed):
    """A process that decodes images has ended by itself."""


class Crew(Protocol):
    """Takes orders and tells of their answers, in threads of its own; used by one thread."""

    def put(self, order: Order) -> bool:
        """Take an order; false where all have enough to do, and the order is to be offered again."""
        ...

    def flush(self) -> None:
        """Begin with the orders that were put since the last time."""
        ...

    def answered(self, ticket: int) -> None:
        """Whoever had that order has room for another one."""
        ...

    def close(self) -> None:
        """End all threads and processes."""
        ...


def shared_memory(n_bytes: int) -> int:
    """A descriptor of memory that has no name, and goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("ddptrain-images")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, n_bytes)
    return fd


class ThreadCrew:
    """Threads of this process."""

    def __init__(self, setup: Setup, decoders: int, tell: Tell) -> None:
        self._room = setup.readers + AHEAD * decoders
        pixels = memoryview(mmap.mmap(setup.pixels_fd, 0))
        self._pipeline = Pipeline(
            setup.reader(),
            pixels,
            setup.size,
            setup.augment,
            lambda answer: tell([answer]),
            readers=setup.readers,
            decoders=decoders,
        )

    def put(self, order: Order) -> bool:
        """See Crew."""
        if self._room == 0:
            return False
        self._room -= 1
        self._pipeline.put(order)
        return True

    def flush(self) -> None:
        """See Crew."""

    def answered(self, ticket: int) -> None:
        """See Crew."""
        self._room += 1

    def close(self) -> None:
        """See Crew."""
        self._pipeline.close()


class ProcessCrew:
    """Processes that have the slots in common with this one; each reads what it decodes."""

    def __init__(self, setup: Setup, processes: int, tell: Tell) -> None:
        self._closed = False
        self._who: dict[int, _Process] = {}
        self._processes = [
            _Process(setup, f"{number} of {processes}", self._told(tell)) for number in range(1, processes + 1)
        ]

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.popen.pid for process in self._processes]

    def put(self, order: Order) -> bool:
        """See Crew."""
        process = max(self._processes, key=lambda process: process.room)
        if process.room == 0:
            return False
        self._who[order.ticket] = process
        process.put(order)
        return True

    def flush(self) -> None:
        """See Crew."""
        for process in self._processes:
            process.flush()

    def answered(self, ticket: int) -> None:
        """See Crew."""
        self._who.pop(ticket).room += 1

    def close(self) -> None:
        """See Crew."""
        self._closed = True
        for process in self._processes:
            process.hang_up()
        for process in self._processes:
            process.join()

    def _told(self, tell: Tell) -> Tell:
        def told(what: Sequence[Answer] | Exception) -> None:
            if not (self._closed and isinstance(what, Exception)):
                tell(what)

        return told


class _Process:
    """One process, and the thread that hears it."""

    def __init__(self, setup: Setup, name: str, tell: Tell) -> None:
        self.room = setup.readers + AHEAD
        self._name, self._tell = name, tell
        self._orders: list[list[object]] = []
        answers, answers_fd = os.pipe()
        try:
            self.popen = _start([setup.pixels_fd, answers_fd])
        finally:
            os.close(answers_fd)
        self._answers = os.fdopen(answers, "rb")
        self._send(sys.path)
        self._send(dataclasses.asdict(dataclasses.replace(setup, answers_fd=answers_fd)))
        self._thread = threading.Thread(target=self._hear, name="ddptrain-images", daemon=True)
        self._thread.start()

    def put(self, order: Order) -> None:
        """Have an order ready for it."""
        self.room -= 1
        wanted = order.wanted
        self._orders.append([order.ticket, order.slot, wanted.key, wanted.size_bytes, wanted.version, order.seed])

    def flush(self) -> None:
        """Send it the orders that are ready."""
        if self._orders:
            self._send(self._orders)
            self._orders.clear()

    def hang_up(self) -> None:
        """Tell it to end."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.close()
        except OSError:
            pass

    def join(self) -> None:
        """Wait until it has ended; kill it if it doesn't."""
        try:
            self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._thread.join()
        self._answers.close()

    def _send(self, what: object) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(what).encode() + b"\n")
            self.popen.stdin.flush()
        except (OSError, ValueError):
            pass  # it is gone: whoever hears it tells

    def _hear(self) -> None:
        for line in self._answers:
            told = json.loads(line)
            self._tell([Answer(*item) if isinstance(item, list) else Answer(item) for item in told])
        status = self.popen.wait()
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        memory = "; the system may have been out of memory" if status == -signal.SIGKILL else ""
        self._tell(
            DecodeProcessLost(
                f"decode process {self._name} (pid {self.popen.pid}) {how}{memory}: lower params.loader_workers, "
                "params.prefetch or params.requests, or see above what it has said"
            )
        )


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
