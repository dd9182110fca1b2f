"""Brings files and checkpoints of ranks home in a thread of its own, so that hashing a gigabyte delays nobody.

What the run directory has no room for waits in the ranks' staging folders, and is tried again.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.driver.messages import BroughtHome, Delayed, Inbox, NotBroughtHome
from ddptrain.driver.transfer.log_mirror import Fetch
from ddptrain.protocol import events
from ddptrain.results.checkpoints import CheckpointPolicy
from ddptrain.results.errors import CheckpointDamaged, FileDamaged, ResultsError, UnsafePath
from ddptrain.results.layout import ARTIFACTS, TRACKING, safe_relative
from ddptrain.results.writer import RunWriter
from ddptrain.worker.spool import READ_LIMIT_BYTES

_LONGEST_PAUSE_S = 60.0
_NICENESS = 10  # of the thread: the ranks of this host come first


class _Unreachable(Exception):
    """A file could not be read from its worker."""


@dataclass(frozen=True, slots=True)
class _Errand:
    rank: int
    what: str
    work: Callable[[], Path]
    vital: bool = True  # the run fails where it can't be done


class Porter:
    """Does one errand after the other; each ends with a message in the inbox."""

    def __init__(self, writer: RunWriter, policy: CheckpointPolicy, inbox: Inbox, max_failures: int = 5) -> None:
        self.writer = writer
        self.policy = policy
        self.inbox = inbox
        self._max_failures = max_failures
        self._given_up = threading.Event()
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ddptrain-porter", daemon=True)
        self._thread.start()

    def bring_checkpoint(self, rank: int, event: events.CheckpointSaved, staging: Path, fetch: Fetch | None) -> None:
        """Bring a staged checkpoint home; `fetch` reads from a worker that doesn't share the driver's file system."""

        def work() -> Path:
            folder = staging / _plain_name(event.staging)
            if fetch is None:
                return self.writer.adopt_checkpoint(rank, event, folder, self.policy)
            files = [(file.name, file.size_bytes) for file in event.files]
            with self._fetched(folder, files, fetch) as fetched:
                return self.writer.adopt_checkpoint(rank, event, fetched, self.policy)

        self._errands.put(_Errand(rank, f"checkpoint step-{event.step}", work))

    def bring_file(self, rank: int, event: events.FileSaved, staging: Path, fetch: Fetch | None) -> None:
        """Bring a staged file home into artifacts/, or another area."""

        def work() -> Path:
            name = _plain_name(event.staging)
            if fetch is None:
                return self.writer.adopt_file(event, staging / name)
            with self._fetched(staging, [(name, event.size_bytes)], fetch) as fetched:
                return self.writer.adopt_file(event, fetched / name)

        what = f"artifact {event.path}" if event.area == ARTIFACTS else f"{event.area} file {event.path}"
        self._errands.put(_Errand(rank, what, work, vital=event.area != TRACKING))

    def close(self, deadline_s: float) -> bool:
        """Finish what is queued; whether that was possible within `deadline_s`."""
        self._errands.put(None)
        self._thread.join(timeout=deadline_s)
        self._given_up.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux: of this thread
        while (errand := self._errands.get()) is not None:
            try:
                home = self._done(errand)
            except Exception as error:
                cause = error.__cause__ if isinstance(error, _Unreachable) else None
                self.inbox.put(NotBroughtHome(errand.rank, errand.what, cause or error, errand.vital))
            else:
                self.inbox.put(BroughtHome(errand.rank, errand.what, str(home)))

    def _done(self, errand: _Errand) -> Path:
        """Do an errand, again and again where the disk, or what stands for one, refuses."""
        failures = 0
        while True:
            try:
                return errand.work()
            except (UnsafePath, CheckpointDamaged, FileDamaged):
                raise  # as wrong the next time
            except (ResultsError, OSError) as error:
                failures += 1
                if failures >= self._max_failures:
                    raise
                self.inbox.put(Delayed(errand.rank, errand.what, error, failures))
                if self._given_up.wait(min(2.0 ** (failures - 1), _LONGEST_PAUSE_S)):
                    raise

    @contextmanager
    def _fetched(self, source: Path, files: list[tuple[str, int]], fetch: Fetch) -> Iterator[Path]:
        """Files of a remote folder, copied in chunks into a folder of the run's scratch folder that goes afterwards."""
        target = self.writer.layout.scratch_dir / f"fetched-{time.time_ns()}"
        target.mkdir(parents=True)
        try:
            for name, size in files:
                _fetch_file(source / _plain_name(name), target / name, size, fetch)
            yield target
        finally:
            shutil.rmtree(target, ignore_errors=True)


def _fetch_file(source: Path, target: Path, size_bytes: int, fetch: Fetch) -> None:
    with target.open("wb") as file:
        while (have := file.tell()) < size_bytes:
            try:
                data = fetch(source, have, min(READ_LIMIT_BYTES, size_bytes - have))
            except Exception as error:
                raise _Unreachable from error
            if not data:
                raise _Unreachable from OSError(f"{source} ends at {have} bytes, {size_bytes} were announced")
            file.write(data)


def _plain_name(name: str) -> str:
    """`name`, if it is a single plain file name. Raises UnsafePath for anything that would lead elsewhere."""
    if len(safe_relative(name).parts) != 1:
        raise UnsafePath(f"{name!r} is no plain name")
    return name
