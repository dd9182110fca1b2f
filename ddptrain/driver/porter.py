"""Brings files and checkpoints of ranks home in a thread of its own, so that hashing a gigabyte delays nobody."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddptrain import events
from ddptrain.driver.inbox import BroughtHome, Inbox, NotBroughtHome
from ddptrain.driver.mirror import Fetch
from ddptrain.results.checkpoints import CheckpointPolicy
from ddptrain.results.errors import UnsafePath
from ddptrain.results.layout import safe_relative
from ddptrain.results.writer import RunWriter
from ddptrain.worker.spool import READ_LIMIT_BYTES


@dataclass(frozen=True, slots=True)
class _Errand:
    rank: int
    what: str
    work: Callable[[], Path]


class Porter:
    """Does one errand after the other; each ends with a message in the inbox."""

    def __init__(self, writer: RunWriter, policy: CheckpointPolicy, inbox: Inbox) -> None:
        self.writer = writer
        self.policy = policy
        self.inbox = inbox
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ddptrain-porter", daemon=True)
        self._thread.start()

    def bring_checkpoint(self, rank: int, event: events.CheckpointSaved, staging: Path, fetch: Fetch | None) -> None:
        """Bring a staged checkpoint home; `fetch` reads from a worker that doesn't share the driver's file system."""

        def work() -> Path:
            folder = staging / _plain_name(event.staging)
            if fetch is not None:
                folder = self._fetched(folder, [(file.name, file.size_bytes) for file in event.files], fetch)
            home: Path = self.writer.adopt_checkpoint(rank, event, folder, self.policy)
            return home

        self._errands.put(_Errand(rank, f"checkpoint step-{event.step}", work))

    def bring_file(self, rank: int, event: events.FileSaved, staging: Path, fetch: Fetch | None) -> None:
        """Bring a staged file home into artifacts/."""

        def work() -> Path:
            name = _plain_name(event.staging)
            folder = self._fetched(staging, [(name, event.size_bytes)], fetch) if fetch is not None else staging
            home: Path = self.writer.adopt_file(event, folder / name)
            return home

        self._errands.put(_Errand(rank, f"artifact {event.path}", work))

    def close(self, deadline_s: float) -> bool:
        """Finish what is queued; whether that was possible within `deadline_s`."""
        self._errands.put(None)
        self._thread.join(timeout=deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                home = errand.work()
            except Exception as error:
                self.inbox.put(NotBroughtHome(errand.rank, errand.what, error))
            else:
                self.inbox.put(BroughtHome(errand.rank, errand.what, str(home)))

    def _fetched(self, source: Path, files: list[tuple[str, int]], fetch: Fetch) -> Path:
        """Copy files of a remote folder into the run's scratch folder, in chunks; return that folder."""
        target = self.writer.layout.scratch_dir / f"fetched-{time.time_ns()}"
        target.mkdir(parents=True)
        try:
            for name, size in files:
                _fetch_file(source / _plain_name(name), target / name, size, fetch)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return target


def _fetch_file(source: Path, target: Path, size_bytes: int, fetch: Fetch) -> None:
    with target.open("wb") as file:
        while (have := file.tell()) < size_bytes:
            data = fetch(source, have, min(READ_LIMIT_BYTES, size_bytes - have))
            if not data:
                raise OSError(f"{source} ends at {have} bytes, {size_bytes} were announced")
            file.write(data)


def _plain_name(name: str) -> str:
    """`name`, if it is a single plain file name. Raises UnsafePath for anything that would lead elsewhere."""
    if len(safe_relative(name).parts) != 1:
        raise UnsafePath(f"{name!r} is no plain name")
    return name
