"""The driver's copy of what one rank writes: its log at home in the run directory, its events decoded in order.

On a shared file system the home log is a hard link to the rank's own file (no copy, and complete even if the driver
is killed), or the file is read as it grows. Elsewhere the bytes come in notices, and a gap is fetched from the spool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ddptrain.protocol import events
from ddptrain.results import files
from ddptrain.worker.spool import READ_LIMIT_BYTES, RankSpool, read_chunk

Fetch = Callable[[Path, int, int], bytes]


class _Stream:
    """One growing file: what of it is here already, and how the rest is had."""

    def __init__(self, source: Path, fetch: Fetch, take: Callable[[bytes], None]) -> None:
        self.source = source
        self.have = 0
        self._fetch = fetch
        self._take = take

    def receive(self, offset: int, data: bytes) -> None:
        """Bytes that came by themselves: what is known is skipped, what is missing before them is fetched."""
        if offset > self.have:
            self.advance(offset)
        fresh = data[self.have - offset :]
        if fresh and offset <= self.have:
            self._take(fresh)
            self.have += len(fresh)

    def advance(self, size: int) -> None:
        """Fetch up to `size`. Raises OSError or ClusterError where the source is gone."""
        while self.have < size:
            data = self._fetch(self.source, self.have, min(READ_LIMIT_BYTES, size - self.have))
            if not data:
                raise OSError(f"{self.source} ends at {self.have} bytes, {size} were announced")
            self._take(data)
            self.have += len(data)


class SpoolMirror:
    """A rank's spool, seen from the driver."""

    def __init__(self, spool: RankSpool, home_log: Path, *, shared: bool, fetch: Fetch) -> None:
        self.spool = spool
        self.home_log = home_log
        self._fetch: Fetch = read_chunk if shared else fetch
        self._linked = shared and _link(spool.log, home_log)
        self._log = None if self._linked else _Stream(spool.log, self._fetch, self._append)
        self._events = _Stream(spool.events, self._fetch, self._split)
        self._partial = b""
        self._lines: list[bytes] = []
        self.refused = 0
        if not self._linked:
            self._append(b"")

    def receive(self, stream: str, offset: int, data: bytes) -> None:
        """Take bytes that a notice carried."""
        if stream == "events":
            self._events.receive(offset, data)
        elif self._log is not None:
            self._log.receive(offset, data)

    def advance(self, log_size: int, events_size: int) -> None:
        """Catch up with the announced sizes. Raises OSError or ClusterError where the source is gone."""
        self._events.advance(events_size)
        if self._log is not None:
            self._log.advance(log_size)

    def catch_up(self) -> None:
        """Take what can be had of a rank that nobody reports on any more (its worker is gone)."""
        try:
            self.advance(*self.spool.sizes())
        except Exception:
            return  # on another machine, and it is gone: what came before stays

    def take_events(self) -> Iterator[events.Event]:
        """The events that have become complete; lines that are none are counted in `refused` and left out."""
        lines, self._lines = self._lines, []
        for line in lines:
            try:
                yield events.decode(line)
            except events.EventFormatError:
                self.refused += 1

    def _append(self, data: bytes) -> None:
        files.append(self.home_log, data)

    def _split(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines += lines
        if len(self._partial) > events.MAX_LINE_BYTES:
            self.refused += 1
            self._partial = b""


def _link(source: Path, target: Path) -> bool:
    """Make `target` another name of `source`, if the file system can and the name is free."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
