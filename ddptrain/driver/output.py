"""The driver's copy of what ranks write: their logs in the run directory, and their events, decoded in order.

On a shared file system the log in the run directory is a hard link to the rank's own file: no copy is needed, and it is
complete even if the driver is killed. If the link is not possible, the file is read as it grows. From other hosts the
bytes come in news, and missing ones are fetched from the rank's spool.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ddptrain.driver.inbox import Inbox, OutputFetched
from ddptrain.driver.ranks import Rank
from ddptrain.driver.transfer.transfer_queue import Fetch, Source
from ddptrain.protocol import events
from ddptrain.protocol.news import RankNews
from ddptrain.results import secure_files
from ddptrain.worker.spool import READ_LIMIT_BYTES, RankSpool, rank_spool, read_chunk

Take = Callable[[Iterable[events.Event], str], None]  # gets new events, and why the files could not be read, or ""


class RankOutput:
    """The output of all ranks of an attempt.

    If bytes must be fetched from a rank's host, a thread waits for them, and what follows for this rank waits, too.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        logs: Sequence[Path],
        inbox: Inbox,
        fetch: Callable[[str, Path, int, int], bytes],
        has: Callable[[str], bool],
    ) -> None:
        """`logs`: each rank's log in the run directory. `fetch` reads from a worker; `has`: whether it is not lost."""
        self._ranks, self._inbox, self._has = ranks, inbox, has
        self._mirrors, self._sources = [], []
        for rank, log in zip(ranks, logs, strict=True):
            spool = rank_spool(rank.place.scratch, rank.spec.run_id, rank.spec.attempt, rank.spec.rank)
            there = partial(fetch, rank.worker)
            self._mirrors.append(LogMirror(spool, log, shared=rank.place.shared, fetch=there))
            self._sources.append(Source(spool.staging, None if rank.place.shared else there))
        self._fetching: dict[int, list[Callable[[], None]]] = {}  # rank -> what waits for its missing bytes

    def read(self, news: RankNews, take: Take) -> None:
        """Read a rank's files up to the sizes in the news; call `take` with the new events, maybe later."""
        rank, mirror = news.rank, self._mirrors[news.rank]
        if rank in self._fetching:
            self._fetching[rank].append(lambda: self.read(news, take))
        elif mirror.lacks(news):
            self._fetching[rank] = []

            def fetch() -> None:
                error = self._receive(news)
                self._inbox.put(OutputFetched(self._ranks[rank].spec.attempt, lambda: self._finish(rank, error, take)))

            threading.Thread(target=fetch, name=f"ddptrain-output-{rank}", daemon=True).start()
        else:
            error = self._receive(news)
            take(mirror.take_events(), error)

    def _finish(self, rank: int, error: str, take: Take) -> None:
        waiting = self._fetching.pop(rank)
        take(self._mirrors[rank].take_events(), error)
        for read in waiting:
            read()

    def _receive(self, news: RankNews) -> str:
        """Read, and return the error as text, "" for none."""
        try:
            self._mirrors[news.rank].receive("events", news.events_size, news.events)
            self._mirrors[news.rank].receive("log", news.log_size, news.log)
        except Exception as raised:  # the files are on another machine, and their content is not trusted
            # If the worker is lost, a message says so, with the reason.
            return (str(raised) or repr(raised)) if self._has(self._ranks[news.rank].worker) else ""
        return ""

    def rest(self, rank: int) -> Iterator[events.Event]:
        """Return the events that can still be read of a lost rank."""
        mirror = self._mirrors[rank]
        if self._ranks[rank].place.shared:
            mirror.catch_up()
        return iter(()) if rank in self._fetching else mirror.take_events()

    def refused(self, rank: int) -> int:
        """Return how many lines of a rank's events file are not valid events."""
        return self._mirrors[rank].refused

    def place_in_log(self, rank: int, size: int) -> int:
        """Return the size in bytes of a rank's log in the run directory when this attempt has added `size` bytes."""
        return self._mirrors[rank].earlier_bytes + size

    def source(self, rank: int) -> Source:
        """Return where the staged files of a rank are. Raises LookupError if there is no such rank."""
        if rank < 0:
            raise LookupError(rank)
        return self._sources[rank]


class LogMirror:
    """The log and the events of a rank. `refused` counts lines of the events file that are not valid events.

    earlier_bytes: the size of the log in the run directory before this attempt.
    """

    def __init__(self, spool: RankSpool, home_log: Path, *, shared: bool, fetch: Fetch) -> None:
        self.spool, self.home_log = spool, home_log
        self.refused = self.earlier_bytes = 0
        self._fetch = read_chunk if shared else fetch
        self._have = {"log": 0, "events": 0}  # bytes of each file that have been taken
        self._shared = self._may_link = shared
        self._is_linked = False  # home_log is the rank's own log
        self._partial_line = b""
        self._lines: list[bytes] = []
        if not shared or os.path.lexists(home_log):  # an earlier attempt's log, or something that must not be there
            self._may_link = False
            secure_files.append(home_log, b"")
            self.earlier_bytes = home_log.stat().st_size

    def lacks(self, news: RankNews) -> bool:
        """Return whether bytes before those in the news must be fetched from another host."""
        known = ("events", news.events_size - len(news.events)), ("log", news.log_size - len(news.log))
        return not self._shared and any(self._have[stream] < offset for stream, offset in known)

    def receive(self, stream: str, size: int, data: bytes = b"") -> None:
        """Read the "log" or the "events" up to `size` bytes, of which `data` are the last ones.

        Raises OSError or ClusterError if the file cannot be read.
        """
        if self._may_link:  # only now: the worker creates the spool when it starts the rank
            self._link()
        if stream == "log" and self._is_linked:
            return
        source, offset = self.spool.events if stream == "events" else self.spool.log, size - len(data)
        while (have := self._have[stream]) < offset:
            found = self._fetch(source, have, min(READ_LIMIT_BYTES, offset - have))
            if not found:
                raise OSError(f"{source} has {have} bytes, not the {offset} announced")
            self._take(stream, found)
        self._take(stream, data[have - offset :])

    def _take(self, stream: str, data: bytes) -> None:
        if stream == "log" and data:
            secure_files.append(self.home_log, data)
        elif data:
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            self._lines += lines
            if len(self._partial_line) > events.MAX_LINE_BYTES:
                self.refused += 1
                self._partial_line = b""
        self._have[stream] += len(data)

    def _link(self) -> None:
        """Make the log in the run directory a hard link to the spool's log; if this fails, it will be copied."""
        self._may_link = False
        try:
            os.link(self.spool.log, self.home_log)
            self._is_linked = True
        except OSError:
            secure_files.append(self.home_log, b"")

    def catch_up(self) -> None:
        """Read as much as possible of the files of a rank whose worker is lost."""
        with suppress(Exception):  # it was on another machine, which is lost: what was read before is kept
            for stream, size in zip(("log", "events"), self.spool.sizes(), strict=True):
                self.receive(stream, size)
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
