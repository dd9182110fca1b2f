"""The queue of ranks' files and checkpoints that wait for their transfer into the run directory.

A thread does the transfers, because hashing takes long; results/staged_files.py checks and moves each file. If the run
directory has no room, the files stay in the rank's staging folder, and the transfer is tried again. A
transfer may take any time, but must not be silent for long.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.driver.inbox import ArtifactFailed, ArtifactRetried, ArtifactStored, Inbox
from ddptrain.log import Log
from ddptrain.protocol import events
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.errors import CheckpointDamaged, FileDamaged, ResultsError, UnsafePath
from ddptrain.results.layout import ARTIFACTS, TRACKING, safe_relative
from ddptrain.results.run_writer import RunWriter
from ddptrain.worker.spool import READ_LIMIT_BYTES

_log = Log(__name__)
_MAX_PAUSE_S = 60.0
_CLOSE_S = 1.0  # for a transfer that is given up to notice it
_NICENESS = 10  # of the thread: ranks on this host have priority


class _Unreachable(Exception):
    """A file could not be read from its worker. It is not tried again."""


class _GivenUp(Exception):
    """The run does not wait for this transfer any more."""


# Reads bytes of a file: path, offset, number of bytes. May return fewer; none at the end of the file.
Fetch = Callable[[Path, int, int], bytes]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rank's staged files are. `fetch` reads from a worker that does not share the driver's file system."""

    staging: Path
    fetch: Fetch | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A checkpoint (with its step) or a file to move into the run directory; the run fails if a `vital` one is lost."""

    rank: int
    what: str
    work: Callable[[], Path]
    vital: bool = True
    step: int | None = None


class TransferQueue:
    """Does one transfer after the other. Each ends with a message in the inbox."""

    def __init__(
        self,
        writer: RunWriter,
        policy: CheckpointPolicy,
        inbox: Inbox,
        source_of: Callable[[int], Source],
        max_failures: int = 5,
    ) -> None:
        """`source_of` says where a rank's files are, or raises LookupError."""
        self._source_of = source_of
        self.writer = writer
        self.policy = policy
        self.inbox = inbox
        self._max_failures = max_failures
        self._failures = 0  # in a row, over all transfers, because a full disk affects all of them
        self.pending: list[Transfer] = []  # those without a message yet, in the order of their transfer
        self._active_s = 0.0  # monotonic: when the last bytes were moved; in a pause after a failure, its end
        self._given_up = False
        self._closed = threading.Event()
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ddptrain-artifacts", daemon=True)
        self._thread.start()

    def add(self, rank: int, event: events.CheckpointSaved | events.FileSaved) -> None:
        """Queue a staged checkpoint, or a staged file for artifacts/ or another area of the run directory."""
        if isinstance(event, events.CheckpointSaved):
            checkpoint = event
            what = f"checkpoint step-{event.step}"
            transfer = Transfer(rank, what, lambda: self._adopt_checkpoint(rank, checkpoint), step=event.step)
        else:
            what = f"artifact {event.path}" if event.area == ARTIFACTS else f"{event.area} file {event.path}"
            file = event
            transfer = Transfer(rank, what, lambda: self._adopt_file(rank, file), vital=event.area != TRACKING)
        if not self.pending:
            self._active_s = time.monotonic()
        self.pending.append(transfer)
        self._queue.put(transfer)

    def _adopt_checkpoint(self, rank: int, event: events.CheckpointSaved) -> Path:
        parts = [(rank, event.staging, event.files), *((part.rank, part.staging, part.files) for part in event.parts)]
        with ExitStack() as copies:
            folders = []
            for number, staging, files in parts:
                try:
                    source = self._source_of(number)
                except LookupError as error:
                    text = f"the checkpoint of step {event.step} has files of rank {number}, which does not exist"
                    raise CheckpointDamaged(text) from error
                folder = source.staging / _file_name(staging)
                folders.append(copies.enter_context(self._on_this_host(source, folder, files)))
            return self.writer.adopt_checkpoint(rank, event, folders[0], self.policy, folders[1:], self._moved)

    def _adopt_file(self, rank: int, event: events.FileSaved) -> Path:
        source, file = self._source_of(rank), events.StagedFile(event.staging, event.size_bytes, event.sha256)
        with self._on_this_host(source, source.staging, [file]) as folder:
            return self.writer.adopt_file(event, folder / _file_name(event.staging), self._moved)

    @contextmanager
    def _on_this_host(self, source: Source, folder: Path, files: Sequence[events.StagedFile]) -> Iterator[Path]:
        """Yield a rank's folder, or a temporary copy of these files if it is on another host."""
        if source.fetch is None:
            yield folder
            return
        target = self.writer.layout.scratch_dir / f"fetched-{time.time_ns()}"
        target.mkdir(parents=True)
        try:
            for file in files:
                path = folder / _file_name(file.name)
                with (target / file.name).open("wb") as copy:
                    while (have := copy.tell()) < file.size_bytes:
                        try:
                            data = source.fetch(path, have, min(READ_LIMIT_BYTES, file.size_bytes - have))
                        except Exception as error:  # whatever Dask raises if the worker has ended
                            raise _Unreachable from error
                        if not data:
                            text = f"{path} has {have} bytes, not the {file.size_bytes} announced"
                            raise _Unreachable from OSError(text)
                        copy.write(data)
                        self._moved()
            yield target
        finally:
            shutil.rmtree(target, ignore_errors=True)

    @property
    def silent_s(self) -> float:
        """Seconds in which the pending transfer has moved nothing, without the pauses after its failures."""
        return max(0.0, time.monotonic() - self._active_s)

    def _moved(self) -> None:
        self._active_s = time.monotonic()
        if self._given_up:
            raise _GivenUp

    def stop_retrying(self) -> None:
        """Try each transfer only once from now on, because the run is ending with an error."""
        self._closed.set()

    def give_up(self) -> None:
        """End the pending transfers at their next bytes. One that hangs in the system is left to its daemon thread."""
        self._given_up = True
        self._closed.set()

    def close(self, silence_s: float) -> bool:
        """Finish the queue, while no transfer is silent for `silence_s` seconds. Return whether it was finished."""
        self._queue.put(None)
        while self._thread.is_alive() and not self._given_up and self.silent_s < silence_s:
            self._thread.join(timeout=0.1)
        self.give_up()
        self._thread.join(timeout=_CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux: of this thread
        while (transfer := self._queue.get()) is not None:
            try:
                self._moved()
                path = self._with_retries(transfer)
            except Exception as error:  # any failure is reported; the thread must continue with the next transfer
                unreachable = isinstance(error, _Unreachable)
                cause = error.__cause__ if unreachable else None
                self.inbox.put(
                    ArtifactFailed(transfer.rank, transfer.what, cause or error, transfer.vital, unreachable)
                )
            else:
                self.inbox.put(ArtifactStored(transfer.rank, str(path), transfer.step))
            self.pending.remove(transfer)

    def _with_retries(self, transfer: Transfer) -> Path:
        """Do the transfer; repeat it after 1, 2, 4, ... 60 s if the run directory cannot be written."""
        while True:
            try:
                path = transfer.work()
            except (UnsafePath, CheckpointDamaged, FileDamaged):
                raise  # it would fail again
            except (ResultsError, OSError) as error:
                self._failures += 1
                if self._failures >= self._max_failures:
                    raise
                pause_s = min(2.0 ** (self._failures - 1), _MAX_PAUSE_S)
                failure = f"failure {self._failures} of {self._max_failures}; again in {pause_s:g} s"
                _log.info("transfer failed", rank=transfer.rank, what=transfer.what, failure=failure, error=error)
                self.inbox.put(ArtifactRetried(transfer.rank, transfer.what, error, failure))
                self._active_s = time.monotonic() + pause_s
                if self._closed.wait(pause_s):
                    raise
            else:
                self._failures = 0
                return path


def _file_name(name: str) -> str:
    """Return `name`. Raises UnsafePath unless it is a single file name: a rank must not write to other folders."""
    if len(safe_relative(name).parts) != 1:
        raise UnsafePath(f"{name!r} is not a file name")
    return name
