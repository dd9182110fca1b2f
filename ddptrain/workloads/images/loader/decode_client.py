"""A decode process from the side of its rank: starts it, sends requests, receives results."""

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

from ddptrain.workloads.images.loader.decode_process import DecodeSetup
from ddptrain.workloads.images.loader.pipeline import DecodeRequest, DecodeResult

AHEAD = 8  # requests of a process beyond those that are being read
_END_S = 2.0
# The search path of the rank, because its code may be a copy from another host; without the working directory.
_PROGRAM = (
    "import json, sys; requests = sys.stdin.buffer; sys.path[:] = json.loads(requests.readline()); "
    "from ddptrain.workloads.images.loader.decode_process import main; main(requests)"
)
# Neither library needs threads of OpenMP.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class DecodeProcess:
    """A process, and the thread that receives its results and calls `on_results` and, at last, `on_end`.

    When `on_end` is called, the process has ended and can write to no slot. All methods are called by one thread.
    """

    def __init__(
        self,
        setup: DecodeSetup,
        on_results: Callable[[Sequence[DecodeResult]], None],
        on_end: Callable[[DecodeProcess], None],
    ) -> None:
        self.pending: dict[int, DecodeRequest] = {}  # by ticket
        self.alone: DecodeRequest | None = None  # the only request that was sent, if they are sent one by one
        self.has_begun = self.has_completed = False
        self.end = ""  # how it ended
        self._most = setup.readers + AHEAD
        self._suspects: deque[DecodeRequest] = deque()
        self._others: list[DecodeRequest] = []
        self._unsent: list[DecodeRequest] = []
        self._on_results, self._on_end = on_results, on_end
        results, results_fd = os.pipe()
        self._results = os.fdopen(results, "rb")
        try:
            self.popen = _start([setup.pixels_fd, results_fd])
        except OSError:
            self._results.close()
            raise
        finally:
            os.close(results_fd)
        self._send(sys.path)
        self._send(dataclasses.asdict(dataclasses.replace(setup, results_fd=results_fd)))
        self._thread = threading.Thread(target=self._receive, name="ddptrain-images", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """How many more requests it can take."""
        return 0 if self.alone is not None else self._most - len(self.pending)

    def put(self, request: DecodeRequest) -> None:
        """Add a request; `flush` sends it."""
        self.pending[request.ticket] = request
        self._unsent.append(request)

    def take_over(self, suspects: Iterable[DecodeRequest], others: Iterable[DecodeRequest]) -> None:
        """Add the requests of another process: first the suspects, each of them alone, then the others."""
        self._suspects.extend(suspects)
        self._others = [*others]
        self.pending |= {request.ticket: request for request in [*self._suspects, *self._others]}
        self._send_next()

    def complete(self, ticket: int) -> None:
        """Remove a request that has a result."""
        del self.pending[ticket]
        self.has_completed = True
        if self.alone is not None:
            self._send_next()

    def flush(self) -> None:
        """Send the requests that were put."""
        if self._unsent:
            self._send([_encode(request) for request in self._unsent])
            self._unsent.clear()

    def close_stdin(self) -> None:
        """Close its stdin, which ends it."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.close()
        except OSError:
            pass

    def join(self) -> None:
        """Wait until the process has ended; kill it after a time limit."""
        self._wait()
        self._thread.join()
        self._results.close()

    def _send_next(self) -> None:
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
            pass  # the process has ended: the receiving thread reports it

    def _receive(self) -> None:
        for line in self._results:
            if line.endswith(b"\n"):  # otherwise it was killed while it wrote
                self.has_begun = True
                self._on_results(
                    [DecodeResult(*item) if isinstance(item, list) else DecodeResult(item) for item in json.loads(line)]
                )
        self.end = self._wait()
        self._on_end(self)

    def _wait(self) -> str:
        """Wait for the end, and describe it; kill the process after a time limit, so that no slot is written."""
        try:
            status = self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            return "did not answer any more, and was ended"
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def _encode(request: DecodeRequest) -> list[object]:
    return [request.ticket, request.slot, dataclasses.astuple(request.wanted), request.seed]


def _start(fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a decode process with SIGTERM and SIGINT blocked, so that signals to the group never reach it."""
    blocked = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, **_ENVIRONMENT},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
