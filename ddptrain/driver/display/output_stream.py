"""A text stream for the display's thread. It never raises, and never blocks forever if its reader stops or exits."""

from __future__ import annotations

import codecs
import errno
import os
import select
import stat
import time
from collections.abc import Callable
from typing import TextIO

POLL_MS = 100
FILE_CHUNK_BYTES = 1 << 20


class Stream:
    """Writes text to a file; `broken` is the reason why nothing can be written any more, or ""."""

    def __init__(
        self,
        file: TextIO | None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.broken = "" if file is not None else "closed"
        self.sent_bytes = 0
        self.encoding = _encoding(file)
        self._file = file
        self._give_up = give_up
        self.fd = _descriptor(file)
        self._chunk_bytes = _chunk_bytes(self.fd)
        self._poll = select.poll()
        if self.fd >= 0:
            self._poll.register(self.fd, select.POLLOUT)

    @property
    def is_terminal(self) -> bool:
        """Whether the stream is a terminal."""
        return self.fd >= 0 and os.isatty(self.fd)

    @property
    def is_unicode(self) -> bool:
        """Whether the encoding has all characters."""
        return self.encoding.startswith("utf")

    def write(self, text: str) -> None:
        """Write whole lines, as fast as the reader reads; characters that the encoding does not have become "?"."""
        self._write(text, self._give_up)

    def write_within(self, text: str, timeout_s: float) -> None:
        """Write as much as the reader reads within `timeout_s`; at least one write is tried."""
        end_s, not_tried = time.monotonic() + timeout_s, iter([True])  # this process may have been suspended
        self._write(text, lambda: not next(not_tried, False) and time.monotonic() > end_s)

    def _write(self, text: str, give_up: Callable[[], bool]) -> None:
        if self.broken or not text:
            return
        data = text.encode(self.encoding, "replace")
        try:
            if self.fd < 0:
                assert self._file is not None
                self._file.write(data.decode(self.encoding))
                self._file.flush()
                self.sent_bytes += len(data)
            else:
                self._send(data, give_up)
        except (OSError, ValueError) as error:
            self._break(error)

    def _send(self, data: bytes, give_up: Callable[[], bool]) -> None:
        """Write the data.

        Wait for room before each write, so that a stopped reader cannot block this thread forever.
        """
        rest = memoryview(data)
        while rest and not give_up():
            if not self._poll.poll(POLL_MS):
                continue
            try:
                count = os.write(self.fd, rest[: self._chunk_bytes])
            except BlockingIOError:
                time.sleep(0.005)  # another process made it non-blocking, and there is too little room
                continue
            rest = rest[count:]
            self.sent_bytes += count

    def _break(self, error: Exception) -> None:
        """Set `broken`, and redirect later writes of this process, also at interpreter exit, to /dev/null."""
        self.broken = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if self.fd >= 0 and isinstance(error, OSError) and error.errno != errno.EBADF:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.fd)
            os.close(devnull)


def _encoding(file: TextIO | None) -> str:
    try:
        return codecs.lookup(getattr(file, "encoding", None) or "utf-8").name
    except LookupError:
        return "utf-8"


def _descriptor(file: TextIO | None) -> int:
    """Flush the file and return its descriptor; -1 if it has none."""
    if file is None:
        return -1
    try:
        file.flush()
        return file.fileno()
    except (OSError, ValueError, AttributeError):
        return -1


def _chunk_bytes(fd: int) -> int:
    """Return the size of one write: a pipe that polls as ready takes PIPE_BUF bytes without blocking."""
    if fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode):
        return FILE_CHUNK_BYTES
    return select.PIPE_BUF
