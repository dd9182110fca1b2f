"""Uploads a run's working folder to an object store, continuously, in a thread.

The folder is compared with what was sent: besides the driver, W&B and other programs write files there. Of a file that
grows only the new part is sent: its first part is an object of its name, the next ones are `NAME.00001` and so on. Only
the last part may still grow, until it has PART_BYTES.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.log import Log
from ddptrain.results.layout import INCOMING, RECORDED, Origin, files_below
from ddptrain.results.remote.checkpoints import CHECKPOINTS, StoredCheckpoints
from ddptrain.results.remote.lease import LOCK, run_for
from ddptrain.results.run import Run
from ddptrain.results.run_record import RecordError, RunRecord
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import Listed, StoreError
from ddptrain.tracking.wandb_files import SENDING

_log = Log(__name__)
PART_BYTES = 256 << 10
_MOST_BYTES = 16 << 20  # of a growing file in a pass: a checkpoint does not wait behind logs
_BYTES_PER_S = 1 << 20  # on average, of another file that changes, which is uploaded completely each time
_SENDERS = 8
_FLUSH_PAUSE_S = 2.0
_RECORD = "run.json"
TEMPORARY = (f"{RECORDED}/cache/", f"{RECORDED}/{SENDING}")  # wandb needs these only during the run
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_PART = re.compile(r"(.+)\.(\d{5})")
_Fingerprint = tuple[int, int, int]


def grows(name: str) -> bool:
    """Return whether a file of a run directory is only appended to."""
    folder, _, file = name.rpartition("/")
    return (folder == "logs" and file.endswith(".log")) or (folder == "" and file.endswith((".jsonl", ".log")))


def joined(files: Mapping[str, Listed]) -> dict[str, dict[str, Listed]]:
    """Return the files of a run by name, each with the objects that it consists of, by path and in their order."""
    found: dict[str, dict[str, Listed]] = {}
    for path in sorted(files):  # NAME is before NAME.00001
        match = _PART.fullmatch(path)
        if match and grows(match[1]) and match[1] in found:
            found[match[1]][path] = files[path]
        else:
            found[path] = {path: files[path]}
    return found


@dataclass(frozen=True, slots=True)
class Pace:
    """How often is uploaded, in seconds.

    pauses: after passes in a row that failed. last_flush: for a flush after one that reached its deadline.
    """

    every_pass: float = 2.0
    every_file: float = 10.0
    every_record: float = 3.0
    pauses: Sequence[float] = (5.0, 10.0, 20.0, 40.0, 60.0)
    last_flush: float = 3.0
    close: float = 5.0


@dataclass(slots=True)
class _Part:
    """The last part of a growing file in the store: its number, and the bytes of the file that it has."""

    number: int = 0
    begin: int = 0
    end: int = -1  # nothing is there


class Uploader:
    """The upload of one run. Other threads write `root`, its working folder.

    max_failures: passes in a row that may fail before the run ends with an error. notes: warnings for begin() to show.
    """

    def __init__(
        self, store: ObjectStore, root: Path, token: str = "", max_failures: int = 5, pace: Pace = Pace()
    ) -> None:
        self.store, self.root = store, root
        self.notes: list[str] = []
        self._token, self._max_failures, self._pace = token, max_failures, pace
        self._checkpoints = StoredCheckpoints(store, Run(root))
        self._sent: dict[str, _Fingerprint] = {}
        self._sent_at: dict[str, float] = {}  # monotonic seconds
        self._sent_attempts = 0
        self._parts: dict[str, _Part] | None = None
        self._failures = 0
        self._problem = ""
        self._timed_out = False
        self._stopped = threading.Event()
        self._state = threading.Condition()
        self._flushes_requested = self._flushes_done = 0
        self._thread: threading.Thread | None = None
        self._loss: DdptrainError | None = None
        self._warn: Callable[[str], None] = lambda text: None
        self._lost: Callable[[DdptrainError], None] | None = None

    def begin(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Mark the folder as the store's working copy, and start the thread. Raises ResultsError.

        `warn` is called for each failure, and `lost` once if the run must end.
        """
        Origin(self.store.url, self._token).mark(self.root)
        self._warn = warn
        for note in self.notes:
            warn(note)
        with self._state:
            self._lost, loss = lost, self._loss
        if loss is not None:
            lost(loss)
        self._thread = threading.Thread(target=self._run, name="ddptrain-uploads", daemon=True)
        self._thread.start()

    def lose(self, error: DdptrainError) -> None:
        """Call `lost`, once: the run must end. After RunLocked nothing more is uploaded."""
        with self._state:
            if self._loss is not None:
                return
            self._loss, lost = error, self._lost
            if isinstance(error, RunLocked):  # the run in the store belongs to another driver now
                self._problem = str(error)
                self._stopped.set()
        if lost is not None:
            lost(error)

    @property
    def begun(self) -> bool:
        """Whether begin() was called."""
        return self._thread is not None

    def flush(self, deadline_s: float) -> str:
        """Upload everything as it is now. Returns "", or one line about the problem if the deadline was reached."""
        if self._thread is None:
            return ""
        if self._timed_out or self._loss is not None:
            deadline_s = min(deadline_s, self._pace.last_flush)
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

    def close(self, deadline_s: float = 30.0) -> None:
        """Flush, stop the thread, and delete the working folder if everything is in the store."""
        why = self.flush(0.0 if self._timed_out else deadline_s)
        self._stopped.set()
        with self._state:
            self._state.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout=self._pace.close)
        if self._thread.is_alive() or isinstance(self._loss, RunLocked):
            return
        if not why:
            shutil.rmtree(self.root, ignore_errors=True)
            return

        def upload_record() -> None:
            with suppress(StoreError, OSError):  # the run's end is recorded even if other files are missing
                self.store.write(_RECORD, self.root / _RECORD)

        run_for(self._pace.close, upload_record)

    # --- The thread ---

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._state:
                requested = self._flushes_requested
            flushing = requested > self._flushes_done
            try:
                complete, has_more = self._pass(flushing)
            except Exception as error:  # any bug or error of the disk: the thread must continue
                known = isinstance(error, DdptrainError)
                self._on_failure(error if known else StoreError(f"cannot upload to {self.store.url}: {error!r}"))
                continue
            self._failures, self._problem = 0, ""
            with self._state:
                if complete and flushing:
                    self._flushes_done = requested
                    self._state.notify_all()
                is_idle = not has_more and self._flushes_requested == self._flushes_done
                if is_idle and not self._stopped.is_set():
                    self._state.wait(self._pace.every_pass)

    def _on_failure(self, error: Exception) -> None:
        if self._stopped.is_set():
            return
        self._failures += 1
        self._problem = str(error)
        _log.info("upload failed", store=self.store.url, failures=self._failures, error=error)
        if self._failures == self._max_failures:
            why = f"no more attempts after {self._failures} failures; all files are kept in {self.root}"
            self.lose(StoreError(f"{error}; {why}"))
        with self._state:
            flushing = self._flushes_requested > self._flushes_done
        pauses = self._pace.pauses
        pause_s = pauses[min(self._failures, len(pauses)) - 1]
        if flushing:
            pause_s = min(_FLUSH_PAUSE_S, pause_s)
        elif self._failures <= self._max_failures:
            self._warn(f"{error} (failure {self._failures} of {self._max_failures}; again in {pause_s:g} s)")
        with self._state:
            self._state.wait_for(
                lambda: self._stopped.is_set() or (not flushing and self._flushes_requested > self._flushes_done),
                pause_s,
            )

    def _pass(self, flushing: bool) -> tuple[bool, bool]:
        """Upload what is due, or everything when flushing.

        Returns whether the store has all that the folder had at the start, and whether more is due now.

        The order: what ranks logged, so that a driver that resumes from a checkpoint has the logs up to it; one
        checkpoint; other files; the record.
        """
        if self._parts is None:
            self._parts = _parts_in(self.store.files(), self.root)
        files = dict(self._files())
        growing = [name for name in files if grows(name)]
        now = flushing or not self._checkpoints.is_synced
        with ThreadPoolExecutor(_SENDERS, thread_name_prefix="ddptrain-uploads") as pool:
            sent = list(pool.map(lambda name: self._send_growing(name, files[name], now=now), growing))
        uploaded = self._checkpoints.sync(before_upload=self._send_new_attempt)
        if not self._checkpoints.is_synced:
            if not flushing:
                self._send_file(_RECORD, now=False)
            return False, flushing or uploaded
        sent += [self._send_file(name, now=flushing) for name in files if not grows(name)]
        sent.append(self._send_file(_RECORD, now=flushing))
        return all(sent), flushing and not all(sent)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield all files but checkpoints, the record, local state, and temporary files."""
        for path, _ in sorted(files_below(self.root)):
            name = path.relative_to(self.root).as_posix()
            is_local = name.startswith((".", f"{CHECKPOINTS}/", *TEMPORARY)) or name in (_RECORD, LOCK)
            if not is_local and not path.name.startswith(INCOMING) and not _TEMPORARY.fullmatch(path.name):
                yield name, path

    def _is_due(self, name: str, every_s: float) -> bool:
        return time.monotonic() >= self._sent_at.get(name, float("-inf")) + every_s

    def _send_growing(self, name: str, path: Path, *, now: bool) -> bool:
        """Send the new lines of a file that grows; return whether the store has all of them."""
        assert self._parts is not None
        part = self._parts.setdefault(name, _Part())
        with suppress(FileNotFoundError), path.open("rb") as file:
            size = file.seek(0, 2)
            if size < part.end:  # another file has its name now
                for number in range(1, part.number + 1):
                    self.store.remove(_part_name(name, number))
                part = self._parts[name] = _Part()
            if size == part.end:
                return True
            if not now and not self._is_due(name, self._pace.every_file):
                return False
            if part.end - part.begin >= PART_BYTES:
                part = _Part(part.number + 1, part.end, part.end)
            file.seek(part.begin)
            data = file.read(max(0, part.end - part.begin) + _MOST_BYTES)
            if name.endswith(".jsonl"):  # the writer takes half a line back if the disk is full
                data = data[: data.rfind(b"\n") + 1]
            if part.begin + len(data) != part.end:
                self.store.write(_part_name(name, part.number), data)
                part.end = part.begin + len(data)
                self._parts[name] = part
                self._sent_at[name] = time.monotonic()
            return size - part.end < _MOST_BYTES
        return True

    def _send_file(self, name: str, *, now: bool) -> bool:
        """Send a file if it has changed and is due; return whether the store has it as it is."""
        path = self.root / name
        try:
            state = path.stat()
        except OSError:
            return True  # it was deleted
        # Times are coarse: a file that is replaced twice within 10 ms differs at least in its inode.
        fingerprint = state.st_size, state.st_mtime_ns, state.st_ino
        if self._sent.get(name) == fingerprint:
            return True
        # It is uploaded completely each time: the larger it is, the less often.
        every_s = self._pace.every_record if name == _RECORD else self._pace.every_file
        if not now and not self._is_due(name, max(every_s, state.st_size / _BYTES_PER_S)):
            return False
        try:
            self.store.write(name, path)
        except StoreError:
            if not path.exists():
                return True
            raise
        self._sent[name], self._sent_at[name] = fingerprint, time.monotonic()
        return True

    def _send_new_attempt(self) -> None:
        """Upload the record of a new attempt before its checkpoints: a driver that resumes counts them."""
        with suppress(OSError, RecordError):
            attempts = len(RunRecord.from_json((self.root / _RECORD).read_bytes()).attempts)
            if attempts != self._sent_attempts:
                self._send_file(_RECORD, now=True)
                self._sent_attempts = attempts


def _part_name(name: str, number: int) -> str:
    return f"{name}.{number:05d}" if number else name


def _parts_in(files: Mapping[str, Listed], root: Path) -> dict[str, _Part]:
    """Return what the store has of the growing files, for a driver that continues a run."""
    parts = {}
    for name, objects in joined(files).items():
        if grows(name) and (root / name).is_file():
            *before, last = (each.size_bytes for each in objects.values())
            parts[name] = _Part(len(before), sum(before), sum(before) + last)
    return parts
