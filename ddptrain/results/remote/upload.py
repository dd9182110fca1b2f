"""Uploads a run's working folder to an object store, continuously, in a thread."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.log import Log
from ddptrain.results.layout import INCOMING, Origin, RunLayout
from ddptrain.results.remote.checkpoint_upload import CHECKPOINTS, StoredCheckpoints
from ddptrain.results.remote.lease import LOCK, run_for
from ddptrain.results.run_record import RecordError, RunRecord
from ddptrain.results.tracker_records import TEMPORARY
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import StoreError

_log = Log(__name__)
_RECORD = "run.json"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

_Fingerprint = tuple[int, int, int]
_Listeners = tuple[Callable[[str], None], Callable[[DdptrainError], None]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a run is uploaded, and how long is waited, in seconds."""

    pass_every_s: float = 2.0
    file_every_s: float = 10.0
    bytes_per_s: int = 1 << 20  # on average, of a growing log, which is uploaded completely each time
    record_every_s: float = 3.0
    pauses_s: tuple[float, ...] = (5.0, 10.0, 20.0, 40.0, 60.0)  # after a pass that failed
    flush_pause_s: float = 2.0
    last_flush_s: float = 3.0  # for a further flush after one that reached its deadline
    close_s: float = 5.0


_PACE = Pace()


class StoreUpload:
    """The upload of one run. Other threads write `root`, its working folder.

    max_failures: passes in a row that may fail before the run ends with an error.
    """

    def __init__(
        self, store: RemoteFolder, root: Path, token: str = "", max_failures: int = 5, pace: Pace = _PACE
    ) -> None:
        self._stopped = threading.Event()
        self.store = replace(store, wait=self._stopped.wait)
        self.root = root
        self._token, self._pace = token, pace
        self._max_failures = max_failures
        self._checkpoints = StoredCheckpoints(self.store, RunLayout(root))
        self._sent: dict[str, _Fingerprint] = {}
        self._sent_at: dict[str, float] = {}  # monotonic seconds
        self._n_sent = 0  # files and checkpoints
        self._sent_attempts = 0
        self._failures = 0
        self._problem = ""
        self._is_taken = self._timed_out = False
        self._state = threading.Condition()
        self._flushes_requested = self._flushes_done = 0
        self._thread: threading.Thread | None = None
        self._warnings: list[str] = []
        self._loss: DdptrainError | None = None
        self._listeners: _Listeners | None = None

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Call `warn` for each failure, and `lost` once if the run must end. Earlier messages are delivered now."""
        with self._state:
            self._listeners = (warn, lost)
            warnings, self._warnings, loss = self._warnings, [], self._loss
        for warning in warnings:
            warn(warning)
        if loss is not None:
            lost(loss)

    def warn(self, text: str) -> None:
        """Deliver a warning, now or as soon as there is a listener."""
        with self._state:
            if self._listeners is None:
                self._warnings.append(text)
                return
            warn, _ = self._listeners
        warn(text)

    def lose(self, error: DdptrainError) -> None:
        """Call the `lost` listener, once: the run must end. After RunLocked nothing more is uploaded."""
        with self._state:
            if self._loss is not None:
                return
            self._loss = error
            if isinstance(error, RunLocked):  # the run in the store belongs to another driver now
                self._is_taken, self._problem = True, str(error)
                self._stopped.set()
            lost = self._listeners[1] if self._listeners else None
        if lost is not None:
            lost(error)

    def begin(self) -> None:
        """Mark the folder as the store's working copy, and start the thread. Raises ResultsError."""
        Origin(self.store.url, self._token).mark(self.root)
        self._thread = threading.Thread(target=self._run, name="ddptrain-uploads", daemon=True)
        self._thread.start()

    @property
    def begun(self) -> bool:
        """Whether begin() was called."""
        return self._thread is not None

    def flush(self, deadline_s: float) -> str:
        """Upload everything as it is now. Returns "", or one line about the problem if the deadline was reached."""
        if self._thread is None:
            return ""
        if self._timed_out or self._loss is not None:
            deadline_s = min(deadline_s, self._pace.last_flush_s)
        until = time.monotonic() + deadline_s
        with self._state:
            self._flushes_requested += 1
            mine = self._flushes_requested
            self._state.notify_all()
            was_lost = self._loss is not None
            while self._flushes_done < mine and not self._stopped.is_set() and (left_s := until - time.monotonic()) > 0:
                if self._loss is not None and not was_lost:
                    break
                # In short pieces: signal handlers run between them.
                self._state.wait(min(left_s, 0.5))
            if self._flushes_done >= mine:
                return ""
            self._timed_out = True
            why = self._problem or f"it took longer than {deadline_s:g} s"
        kept = f"they are kept in {self.root}, and --resume {self.root.name} uploads them"
        return f"the results are not all in {self.store.url} ({why}); {kept}"

    def close(self, deadline_s: float) -> None:
        """Flush, stop the thread, and delete the working folder if everything is in the store."""
        why = self.flush(0.0 if self._timed_out else deadline_s)
        self._stopped.set()
        with self._state:
            self._state.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout=self._pace.close_s)
        if self._thread.is_alive() or self._is_taken:
            return
        if not why:
            shutil.rmtree(self.root, ignore_errors=True)
        else:
            run_for(self._pace.close_s, self._upload_final_record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(30.0)

    def _upload_final_record(self) -> None:
        with suppress(StoreError, OSError):  # the run's end is recorded even if other files are missing
            self.store.write(_RECORD, self._record.read_bytes())

    # The thread.

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._state:
                requested = self._flushes_requested
            flushing = requested > self._flushes_done
            sent = self._n_sent
            try:
                complete = self._pass(flushing)
            except DdptrainError as error:
                self._on_failure(error)
                continue
            except Exception as error:  # any bug or error of the disk: the thread must continue
                self._on_failure(StoreError(f"cannot upload to {self.store.url}: {error!r}"))
                continue
            self._failures, self._problem = 0, ""
            with self._state:
                if complete and flushing:
                    self._flushes_done = requested
                    self._state.notify_all()
                # While something was sent there may be more that is due, as the next checkpoint.
                has_more = not complete and (flushing or self._n_sent > sent)
                if not has_more and self._flushes_requested == self._flushes_done and not self._stopped.is_set():
                    self._state.wait(self._pace.pass_every_s)

    def _on_failure(self, error: DdptrainError) -> None:
        if self._stopped.is_set():
            return
        self._failures += 1
        self._problem = str(error)
        _log.info("upload failed", store=self.store.url, failures=self._failures, error=error)
        if self._failures == self._max_failures:
            self.lose(
                StoreError(
                    f"{error}; no more attempts after {self._failures} failures; all files are kept in {self.root}"
                )
            )
        pauses_s = self._pace.pauses_s
        pause_s = pauses_s[min(self._failures, len(pauses_s)) - 1]
        with self._state:
            flushing = self._flushes_requested > self._flushes_done
        if flushing:
            pause_s = self._pace.flush_pause_s
        elif self._failures <= self._max_failures:
            self.warn(f"{error} (failure {self._failures} of {self._max_failures}; again in {pause_s:g} s)")
        with self._state:
            self._state.wait_for(
                lambda: self._stopped.is_set() or (not flushing and self._flushes_requested > self._flushes_done),
                pause_s,
            )

    def _pass(self, flushing: bool) -> bool:
        """Upload what is due, or everything when flushing, the record last. Returns whether the store is complete."""
        # A checkpoint is uploaded after other files, so that a driver that resumes from it has the logs up to it.
        least_s = self._pace.file_every_s if self._checkpoints.is_synced else 0.0
        for path in self._files():
            self._send_file(path, least_s, flushing)
        self._n_sent += self._checkpoints.sync(before_upload=self._send_new_attempt)
        if not self._checkpoints.is_synced:
            if not flushing:
                self._send_record()
            return False
        self._send_record(now=flushing)
        return all(self._sent.get(self._name(path)) == _fingerprint(path) for path in (*self._files(), self._record))

    @property
    def _record(self) -> Path:
        return self.root / _RECORD

    def _files(self) -> Iterator[Path]:
        """Yield all files but checkpoints, the record, local state, and temporary files."""
        with suppress(OSError):
            for top in sorted(self.root.iterdir()):
                if not top.name.startswith(".") and top.name not in (CHECKPOINTS, _RECORD, LOCK):
                    yield from (path for path in _walk(top) if not self._name(path).startswith(TEMPORARY))

    def _send_file(self, path: Path, least_s: float, now: bool) -> None:
        name, fingerprint = self._name(path), _fingerprint(path)
        if fingerprint is None or self._sent.get(name) == fingerprint:
            return
        # A growing file is uploaded completely each time: the larger it is, the less often.
        pause_s = max(least_s, fingerprint[0] / self._pace.bytes_per_s)
        if not now and time.monotonic() < self._sent_at.get(name, -pause_s) + pause_s:
            return
        try:
            self.store.write(name, path)
        except StoreError:
            if not path.exists():
                return
            raise
        self._note_sent(name, fingerprint)

    def _send_record(self, *, now: bool = False) -> None:
        fingerprint = _fingerprint(self._record)
        if fingerprint is None or self._sent.get(_RECORD) == fingerprint:
            return
        every_s = self._pace.record_every_s
        if now or time.monotonic() >= self._sent_at.get(_RECORD, -every_s) + every_s:
            self.store.write(_RECORD, self._record.read_bytes())
            self._note_sent(_RECORD, fingerprint)

    def _note_sent(self, name: str, fingerprint: _Fingerprint) -> None:
        self._sent[name] = fingerprint
        self._sent_at[name] = time.monotonic()
        self._n_sent += 1

    def _send_new_attempt(self) -> None:
        """Upload the record of a new attempt before its checkpoints: a driver that resumes counts them."""
        try:
            attempts = len(RunRecord.from_json(self._record.read_bytes()).attempts)
        except (OSError, RecordError):
            return
        if attempts != self._sent_attempts:
            self._send_record(now=True)
            self._sent_attempts = attempts

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _walk(path: Path) -> Iterator[Path]:
    """Yield the regular files at or below a path. Links, and files that vanish meanwhile, are left out."""
    with suppress(OSError):
        if path.is_symlink() or _TEMPORARY.fullmatch(path.name) or path.name.startswith(INCOMING):
            return
        if path.is_file():
            yield path
        else:
            for entry in sorted(path.iterdir()):
                yield from _walk(entry)


def _fingerprint(path: Path) -> _Fingerprint | None:
    try:
        state = path.stat()
    except OSError:
        return None
    # Times are coarse: a file that is replaced twice within 10 ms differs at least in its inode.
    return state.st_size, state.st_mtime_ns, state.st_ino
