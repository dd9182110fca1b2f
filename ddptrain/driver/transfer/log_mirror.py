"""The driver's copy of what one rank writes: its log in the run directory, and its events, decoded in order.

On a shared file system the log in the run directory is a hard link to the rank's own file: no copy is needed, and it is
complete even if the driver is killed. If the link is not possible, the file is read as it grows. From other hosts the
bytes come in notices, and missing ones are fetched from the rank's spool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ddptrain.protocol import events
from ddptrain.results import secure_files
from ddptrain.worker.spool import READ_LIMIT_BYTES, RankSpool, read_chunk

# Reads bytes of a file: path, offset, number of bytes. May return fewer; none at the end of the file.
Fetch = Callable[[Path, int, int], bytes]


class _GrowingFile:
    """One file that grows: `have` bytes of it have been taken."""

    def __init__(self, source: Path, fetch: Fetch, take: Callable[[bytes], None]) -> None:
        self.source = source
        self.have = 0
        self._fetch = fetch
        self._take = take

    def receive(self, offset: int, data: bytes) -> None:
        """Add the bytes of a notice: skip bytes that are already here, and fetch missing bytes before them."""
        if offset > self.have:
            self.advance(offset)
        fresh = data[self.have - offset :]
        if fresh:
            self._take(fresh)
            self.have += len(fresh)

    def advance(self, size: int) -> None:
        """Fetch everything up to `size` bytes. Raises OSError or ClusterError if the file cannot be read."""
        while self.have < size:
            data = self._fetch(self.source, self.have, min(READ_LIMIT_BYTES, size - self.have))
            if not data:
                raise OSError(f"{self.source} has {self.have} bytes, not the {size} announced")
            self._take(data)
            self.have += len(data)


class LogMirror:
    """The log and the events of a rank. `refused` counts lines of the events file that are not valid events."""

    def __init__(self, spool: RankSpool, home_log: Path, *, shared: bool, fetch: Fetch) -> None:
        self.spool = spool
        self.home_log = home_log
        self.refused = 0
        fetch = read_chunk if shared else fetch
        self._events = _GrowingFile(spool.events, fetch, self._take_events)
        self._log: _GrowingFile | None = _GrowingFile(spool.log, fetch, self._append)  # None if home_log is a hard link
        self._shared = self._may_link = shared
        self._log_size = 0
        self._partial_line = b""
        self._lines: list[bytes] = []
        if not shared or os.path.lexists(home_log):  # an earlier attempt's log, or something that must not be there
            self._may_link = False
            self._append(b"")

    def receive(self, stream: str, offset: int, data: bytes) -> None:
        """Add the bytes of a notice; `stream` is "log" or "events"."""
        if stream == "events":
            self._events.receive(offset, data)
        elif self._log is not None:
            self._log.receive(offset, data)

    def lacks(self, stream: str, size: int) -> bool:
        """Return whether bytes before `size` must be fetched; `stream` is "log" or "events"."""
        file = self._events if stream == "events" else self._log
        return not self._shared and file is not None and file.have < size

    def log_grew(self, log_size: int) -> bool:
        """Return whether the rank's log has more bytes than at the last call."""
        grew, self._log_size = log_size > self._log_size, log_size
        return grew

    def advance(self, log_size: int, events_size: int) -> None:
        """Fetch everything up to these sizes in bytes. Raises OSError or ClusterError if a file cannot be read."""
        if self._may_link:  # only now: the worker creates the spool when it starts the rank
            self._link()
        self._events.advance(events_size)
        if self._log is not None:
            self._log.advance(log_size)

    def _link(self) -> None:
        """Make the log in the run directory a hard link to the spool's log; if this fails, it will be copied."""
        self._may_link = False
        try:
            os.link(self.spool.log, self.home_log)
            self._log = None
        except OSError:
            self._append(b"")

    def catch_up(self) -> None:
        """Read as much as possible of the files of a rank whose worker is lost."""
        with suppress(Exception):  # it was on another machine, which is lost: what was read before is kept
            self.advance(*self.spool.sizes())
        if self._may_link:
            self._link()  # an empty log, if the rank was never started

    def take_events(self) -> Iterator[events.Event]:
        """Yield the events that are complete since the last call. Invalid lines are counted and left out."""
        lines, self._lines = self._lines, []
        for line in lines:
            try:
                yield events.decode(line)
            except events.EventFormatError:
                self.refused += 1

    def _append(self, data: bytes) -> None:
        secure_files.append(self.home_log, data)

    def _take_events(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._lines += lines
        if len(self._partial_line) > events.MAX_LINE_BYTES:
            self.refused += 1
            self._partial_line = b""
