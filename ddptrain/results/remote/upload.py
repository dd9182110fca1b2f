"""Keeps a run's folder in an object store like the one on the disk, from a thread of its own."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.results.errors import StoreError
from ddptrain.results.layout import INCOMING, RunLayout
from ddptrain.results.remote.checkpoints import CHECKPOINTS, StoredCheckpoints
from ddptrain.results.remote.local_copy import Origin
from ddptrain.results.remote.lock import LOCK, briefly
from ddptrain.results.remote.store import Store
from ddptrain.results.tracking.record import OF_NO_USE

_LOOK_EVERY_S = 2.0
_FILE_EVERY_S = 10.0
_BYTES_PER_S = 1 << 20  # on average, of a log that is uploaded as a whole again and again
_RECORD_EVERY_S = 3.0
_PAUSES_S = (5.0, 10.0, 20.0, 40.0, 60.0)  # after a pass that failed
_FLUSH_PAUSE_S = 2.0
_LAST_S = 3.0  # for another try, once one has taken all of its time
_PARTING_S = 5.0
_RECORD = "run.json"
_BESIDE = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

_Fingerprint = tuple[int, int, int]


class Uploads:
    """The upload of one run; `root` is its working folder, which other threads write.

    warn is told of each failure, lost of the one that is one too many, or of a lock that was taken away.
    """

    def __init__(self, store: Store, root: Path, token: str = "", max_failures: int = 5) -> None:
        self._over = threading.Event()
        self.store = replace(store, wait=self._over.wait)
        self.root = root
        self._token = token
        self._max_failures = max_failures
        self._checkpoints = StoredCheckpoints(self.store, RunLayout(root))
        self._sent: dict[str, _Fingerprint] = {}
        self._sent_at: dict[str, float] = {}  # monotonic seconds
        self._failures = 0
        self._problem = ""
        self._taken = self._in_vain = False
        self._state = threading.Condition()
        self._asked = self._done = 0
        self._thread: threading.Thread | None = None
        self._remarks: list[str] = []
        self._loss: DdptrainError | None = None
        self._listeners: tuple[Callable[[str], None], Callable[[DdptrainError], None]] | None = None

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """From now on tell these two, and what there was before at once."""
        with self._state:
            self._listeners = (warn, lost)
            remarks, self._remarks, loss = self._remarks, [], self._loss
        for remark in remarks:
            warn(remark)
        if loss is not None:
            lost(loss)

    def warn(self, text: str) -> None:
        """Say something about the store, now or once somebody listens."""
        with self._state:
            if self._listeners is None:
                self._remarks.append(text)
                return
            warn, _ = self._listeners
        warn(text)

    def lose(self, error: DdptrainError) -> None:
        """Say, once, that the run must end for the store's sake; after RunLocked nothing is uploaded any more."""
        with self._state:
            if self._loss is not None:
                return
            self._loss = error
            if isinstance(error, RunLocked):  # what is there is another driver's now
                self._taken, self._problem = True, str(error)
                self._over.set()
            lost = self._listeners[1] if self._listeners else None
        if lost is not None:
            lost(error)

    def begin(self) -> None:
        """Mark the folder as the store's working copy, and begin to upload it. Raises ResultsError."""
        Origin(self.store.url, self._token).mark(self.root)
        self._thread = threading.Thread(target=self._run, name="ddptrain-uploads", daemon=True)
        self._thread.start()

    @property
    def begun(self) -> bool:
        """Whether there is anything to upload."""
        return self._thread is not None

    def flush(self, deadline_s: float) -> str:
        """Upload everything as it is now; what is wrong, in one line, where that was not possible in time."""
        if self._thread is None:
            return ""
        if self._in_vain or self._loss is not None:
            deadline_s = min(deadline_s, _LAST_S)
        until = time.monotonic() + deadline_s
        with self._state:
            self._asked += 1
            mine = self._asked
            self._state.notify_all()
            given_up = self._loss is not None
            while self._done < mine and not self._over.is_set() and (left_s := until - time.monotonic()) > 0:
                if self._loss is not None and not given_up:
                    break
                # In short pieces: a signal's handler runs between them.
                self._state.wait(min(left_s, 0.5))
            if self._done >= mine:
                return ""
            self._in_vain = True
            why = self._problem or f"it took longer than {deadline_s:g} s"
        kept = f"they are kept in {self.root}, and --resume {self.root.name} uploads them"
        return f"the results are not all in {self.store.url} ({why}); {kept}"

    def close(self, deadline_s: float) -> None:
        """Flush, stop, and delete the working folder, if all of it is in the store."""
        why = self.flush(0.0 if self._in_vain else deadline_s)
        self._over.set()
        with self._state:
            self._state.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout=_PARTING_S)
        if self._thread.is_alive() or self._taken:
            return
        if not why:
            shutil.rmtree(self.root, ignore_errors=True)
        else:
            briefly(self._send_last_record, _PARTING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(30.0)

    def _send_last_record(self) -> None:
        with suppress(StoreError, OSError):  # how it ended is true, whatever else is missing
            self.store.write(_RECORD, self._record.read_bytes())

    # The thread.

    def _run(self) -> None:
        while not self._over.is_set():
            with self._state:
                asked = self._asked
            flushing = asked > self._done
            try:
                clean = self._pass(flushing)
            except DdptrainError as error:
                self._on_failure(error)
                continue
            except Exception as error:  # whatever it is, the thread goes on
                self._on_failure(StoreError(f"cannot upload to {self.store.url}: {error!r}"))
                continue
            self._failures, self._problem = 0, ""
            with self._state:
                if clean and flushing:
                    self._done = asked
                    self._state.notify_all()
                if clean and self._asked == self._done and not self._over.is_set():
                    self._state.wait(_LOOK_EVERY_S)

    def _on_failure(self, error: DdptrainError) -> None:
        if self._over.is_set():
            return
        self._failures += 1
        self._problem = str(error)
        if self._failures == self._max_failures:
            self.lose(StoreError(f"{error}; given up after {self._failures} failures, all is kept in {self.root}"))
        pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S)) - 1]
        with self._state:
            flushing = self._asked > self._done
        if flushing:
            pause_s = _FLUSH_PAUSE_S
        elif self._failures <= self._max_failures:
            self.warn(f"{error} (failure {self._failures} of {self._max_failures}; again in {pause_s:g} s)")
        with self._state:
            self._state.wait_for(lambda: self._over.is_set() or (not flushing and self._asked > self._done), pause_s)

    def _pass(self, flushing: bool) -> bool:
        """Upload what is due, all of it when flushing, the record last; whether everything is there now."""
        # Before a checkpoint goes what led to it: whoever goes on from there has the logs up to there.
        least_s = 0.0 if flushing or not self._checkpoints.is_synced else _FILE_EVERY_S
        for path in self._files():
            self._send_file(path, least_s, flushing)
        self._checkpoints.sync()
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
        """Everything but checkpoints, the record, what is ours alone, and what is being written."""
        with suppress(OSError):
            for top in sorted(self.root.iterdir()):
                if not top.name.startswith(".") and top.name not in (CHECKPOINTS, _RECORD, LOCK):
                    yield from (path for path in _walk(top) if not self._name(path).startswith(OF_NO_USE))

    def _send_file(self, path: Path, least_s: float, now: bool) -> None:
        name, fingerprint = self._name(path), _fingerprint(path)
        if fingerprint is None or self._sent.get(name) == fingerprint:
            return
        # A file that grows is uploaded as a whole each time: the larger, the less often.
        pause_s = max(least_s, fingerprint[0] / _BYTES_PER_S)
        if not now and time.monotonic() < self._sent_at.get(name, -pause_s) + pause_s:
            return
        try:
            self.store.send(name, path)
        except StoreError:
            if not path.exists():
                return
            raise
        self._sent[name] = fingerprint
        self._sent_at[name] = time.monotonic()

    def _send_record(self, *, now: bool = False) -> None:
        fingerprint = _fingerprint(self._record)
        if fingerprint is None or self._sent.get(_RECORD) == fingerprint:
            return
        if now or time.monotonic() >= self._sent_at.get(_RECORD, -_RECORD_EVERY_S) + _RECORD_EVERY_S:
            self.store.write(_RECORD, self._record.read_bytes())
            self._sent[_RECORD] = fingerprint
            self._sent_at[_RECORD] = time.monotonic()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _walk(path: Path) -> Iterator[Path]:
    """The plain files at or below a path; links lead elsewhere, and what has just gone is left out."""
    with suppress(OSError):
        if path.is_symlink() or _BESIDE.fullmatch(path.name) or path.name.startswith(INCOMING):
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
    # Times are coarse: a file that is replaced twice in a hundredth of a second has another number at least.
    return state.st_size, state.st_mtime_ns, state.st_ino
