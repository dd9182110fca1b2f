"""Writes a rank's events: one JSON line each, appended to the file descriptor that the worker has opened."""

from __future__ import annotations

import os
import threading
import time

from ddptrain.protocol import events

PROGRESS_INTERVAL_S = 0.1  # ten events per second are enough for a display


class Emitter:
    """Appends events to `fd`, from any thread. Events of a forked child (a DataLoader worker) are dropped."""

    def __init__(self, fd: int, path: str = "") -> None:
        """If `path` is given, it is opened again when the user's code has closed `fd`."""
        self._fd = fd
        self._path = path
        self._file = os.fstat(fd) if path else None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_line_incomplete = False
        self._progress_at = -PROGRESS_INTERVAL_S
        self._done: float | None = None

    def emit(self, event: events.Event) -> None:
        """Append one event. Raises OSError if the disk is full, EventFormatError if the event is too long."""
        if os.getpid() != self._pid:
            return
        data = events.encode(event)
        with self._lock:
            self._reopen_if_closed()
            data = b"\n" + data if self._is_line_incomplete else data  # a full disk has cut off the last line
            while data:
                data = data[os.write(self._fd, data) :]
                self._is_line_incomplete = bool(data)

    def _reopen_if_closed(self) -> None:
        """Open the file again if its descriptor is closed, as daemons do with all, or belongs to another file now."""
        if self._file is None:
            return
        try:
            if os.path.samestat(os.fstat(self._fd), self._file):
                return
        except OSError:
            pass
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def progress(self, done: float, total: float | None, unit: str) -> None:
        """Append a Progress event, at most ten per second. The last one (done == total) is always appended, once."""
        now = time.monotonic()
        is_last = done == total != self._done
        if now - self._progress_at < PROGRESS_INTERVAL_S and not is_last:
            return
        self._progress_at, self._done = now, done
        self.emit(events.Progress(time.time_ns(), done=done, total=total, unit=unit))
