"""Uploads a run's working folder to an object store, continuously: checkpoints in one thread, other files in another.

RunWriter says what it has written. W&B, ranks and other programs write files, too: the folder is looked at every few
seconds, at the beginning (a driver that was killed has left files) and at the end. A file that grows is sent in pieces,
each byte once: the objects NAME, NAME.00001, NAME.00002 and so on.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.log import Log
from ddptrain.results.layout import INCOMING, RECORDED, Origin, files_below
from ddptrain.results.remote.checkpoints import CHECKPOINTS, StoredCheckpoints
from ddptrain.results.remote.lease import LOCK, run_for
from ddptrain.results.run_record import RecordError, RunRecord
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import Listed, StoreError
from ddptrain.tracking.wandb_files import SENDING

_log = Log(__name__)
_PIECE_BYTES = 4 << 20  # at most
_FULL_BYTES = 1 << 20  # so much is sent at once
_PIECES_A_S = 5  # the more pieces a file has, the rarer a new one is, so that a day has about 900
_NUMBERS = ("metrics.jsonl", "events.jsonl")
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
class _Growing:
    """What the store has of a growing file: its first `end` bytes, in so many pieces."""

    end: int = 0
    pieces: int = 0
    sent_at: float = float("-inf")  # monotonic seconds
    mutex: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class _Lane:
    """A thread. work: one pass; flushing or not -> whether all is sent, and whether more is due now."""

    name: str
    work: Callable[[bool], tuple[bool, bool]]
    flushed: int = 0  # flushes that are complete
    failures: int = 0  # in a row
    problem: str = ""
    thread: threading.Thread | None = None


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
        self._checkpoints = StoredCheckpoints(store, root, self._send_numbers)
        self._growing: dict[str, _Growing] | None = None
        self._changed: dict[str, None] = {}  # other files, in the order of their changes
        self._has_new_checkpoint = True
        self._looked_at = float("-inf")
        self._sent: dict[str, _Fingerprint] = {}
        self._sent_at: dict[str, float] = {}  # monotonic seconds
        self._sent_attempts = 0
        self._mutex = threading.RLock()  # of the record, and of what the store has
        self._lanes = (_Lane("checkpoints", self._send_checkpoints), _Lane("files", self._send_files))
        self._why_lost = ""
        self._timed_out = False
        self._stopped = threading.Event()
        self._state = threading.Condition()
        self._flushes = self._changes = 0
        self._loss: DdptrainError | None = None
        self._warn: Callable[[str], None] = lambda text: None
        self._lost: Callable[[DdptrainError], None] | None = None

    def begin(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Mark the folder as the store's working copy, and start the threads. Raises ResultsError.

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
        for lane in self._lanes:
            name = f"ddptrain-upload-{lane.name}"
            lane.thread = threading.Thread(target=self._run, args=(lane,), name=name, daemon=True)
            lane.thread.start()

    def put(self, name: str) -> None:
        """Upload this file of the run: it is new, or has changed."""
        if not grows(name):
            self._changed[name] = None
        elif self._growing is not None:
            self._growing.setdefault(name, _Growing())

    def put_checkpoints(self) -> None:
        """Upload new checkpoints now, and delete those that were dropped."""
        with self._state:
            self._has_new_checkpoint = True
            self._wake()

    def lose(self, error: DdptrainError) -> None:
        """Call `lost`, once: the run must end. After RunLocked nothing more is uploaded."""
        with self._state:
            if self._loss is not None:
                return
            self._loss, lost = error, self._lost
            if isinstance(error, RunLocked):  # the run in the store belongs to another driver now
                self._why_lost = str(error)
                self._stopped.set()
        if lost is not None:
            lost(error)

    @property
    def begun(self) -> bool:
        """Whether begin() was called."""
        return self._lanes[0].thread is not None

    def flush(self, deadline_s: float) -> str:
        """Upload everything as it is now. Returns "", or one line about the problem if the deadline was reached."""
        if not self.begun:
            return ""
        if self._timed_out or self._loss is not None:
            deadline_s = min(deadline_s, self._pace.last_flush)
        until = time.monotonic() + deadline_s
        with self._state:
            self._flushes += 1
            mine = self._flushes
            self._has_new_checkpoint = True
            self._wake()
            was_lost = self._loss is not None
            while not (done := self._flushed(mine)) and not self._stopped.is_set():
                left_s = until - time.monotonic()
                if left_s <= 0 or (self._loss is not None and not was_lost):
                    break
                # In short pieces: signal handlers run between them.
                self._state.wait(min(left_s, 0.5))
            if done:
                return ""
            self._timed_out = True
            slow = f"it took longer than {deadline_s:g} s"
            problem = next(filter(None, [self._why_lost, *(lane.problem for lane in self._lanes), slow]))
        kept = f"they are kept in {self.root}, and --resume {self.root.name} uploads them"
        return f"the results are not all in {self.store.url} ({problem}); {kept}"

    def close(self, deadline_s: float = 30.0) -> None:
        """Flush, stop the threads, and delete the working folder if everything is in the store."""
        why = self.flush(0.0 if self._timed_out else deadline_s)
        self._stopped.set()
        with self._state:
            self._wake()
        if not self.begun:
            return
        until = time.monotonic() + self._pace.close
        for lane in self._lanes:
            assert lane.thread is not None
            lane.thread.join(timeout=max(0.0, until - time.monotonic()))
            if lane.thread.is_alive():
                return
        if isinstance(self._loss, RunLocked):
            return
        if not why:
            shutil.rmtree(self.root, ignore_errors=True)
            return

        def upload_record() -> None:
            with suppress(StoreError, OSError):  # the run's end is recorded even if other files are missing
                self.store.write(_RECORD, self.root / _RECORD)

        run_for(self._pace.close, upload_record)

    def _flushed(self, number: int) -> bool:
        return all(lane.flushed >= number for lane in self._lanes)

    def _wake(self) -> None:
        self._changes += 1
        self._state.notify_all()

    # --- The threads ---

    def _run(self, lane: _Lane) -> None:
        while not self._stopped.is_set():
            with self._state:
                requested, changes = self._flushes, self._changes
            flushing = requested > lane.flushed
            try:
                self._load()
                complete, has_more = lane.work(flushing)
            except Exception as error:  # any bug or error of the disk: the thread must continue
                known = isinstance(error, DdptrainError)
                self._on_failure(lane, error if known else StoreError(f"cannot upload to {self.store.url}: {error!r}"))
                continue
            lane.failures, lane.problem = 0, ""
            with self._state:
                if complete and flushing:
                    lane.flushed = requested
                    self._wake()
                elif not has_more:
                    until = time.monotonic() + self._pace.every_pass
                    while self._changes == changes and (left_s := until - time.monotonic()) > 0:
                        self._state.wait(left_s)

    def _on_failure(self, lane: _Lane, error: Exception) -> None:
        if self._stopped.is_set():
            return
        lane.failures += 1
        lane.problem = str(error)
        _log.info("upload failed", store=self.store.url, failures=lane.failures, error=error)
        if lane.failures == self._max_failures:
            why = f"no more attempts after {lane.failures} failures; all files are kept in {self.root}"
            self.lose(StoreError(f"{error}; {why}"))
        with self._state:
            flushing = self._flushes > lane.flushed
        pauses = self._pace.pauses
        pause_s = pauses[min(lane.failures, len(pauses)) - 1]
        # A store that is away fails in both threads: one of them says it.
        is_first = all(lane is other or lane.failures > other.failures for other in self._lanes)
        if flushing:
            pause_s = min(_FLUSH_PAUSE_S, pause_s)
        elif is_first and lane.failures <= self._max_failures:
            self._warn(f"{error} (failure {lane.failures} of {self._max_failures}; again in {pause_s:g} s)")
        with self._state:
            self._state.wait_for(
                lambda: self._stopped.is_set() or (not flushing and self._flushes > lane.flushed), pause_s
            )

    def _load(self) -> None:
        """Ask the store what it has, once: the driver may continue a run."""
        with self._mutex:
            if self._growing is None:
                found = joined(self.store.files())
                self._growing = {
                    name: _Growing(sum(each.size_bytes for each in objects.values()), len(objects))
                    for name, objects in found.items()
                    if grows(name) and (self.root / name).is_file()
                }

    # --- Checkpoints ---

    def _send_checkpoints(self, flushing: bool) -> tuple[bool, bool]:
        if not self._has_new_checkpoint:
            return True, False
        self._has_new_checkpoint = False
        try:
            uploaded = self._checkpoints.sync()
        finally:
            if not self._checkpoints.is_synced:  # put_checkpoints() may be called meanwhile
                self._has_new_checkpoint = True
        if uploaded:
            for name in list(self._growing or ()):  # a driver that resumes from it should have the logs up to it
                self._grown(name).sent_at = float("-inf")
        return not self._has_new_checkpoint, uploaded

    def _send_numbers(self) -> None:
        """Upload metrics, events, and the record of a new attempt, without which a checkpoint must not be resumed."""
        for name in _NUMBERS:
            while not self._send_growing(name, now=True):
                pass
        with suppress(OSError, RecordError):
            attempts = len(RunRecord.from_json((self.root / _RECORD).read_bytes()).attempts)
            if attempts != self._sent_attempts:
                self._send_file(_RECORD, now=True)
                self._sent_attempts = attempts

    # --- Other files ---

    def _send_files(self, flushing: bool) -> tuple[bool, bool]:
        """Upload what is due, or everything when flushing: the record comes last, after the checkpoints."""
        with self._state:
            flushes = self._flushes
        if flushing or time.monotonic() >= self._looked_at + self._pace.every_file:
            self._look()
        with ThreadPoolExecutor(_SENDERS, thread_name_prefix="ddptrain-uploads") as pool:
            sent = list(pool.map(lambda name: self._send_growing(name, now=flushing), list(self._growing or ())))
        for name in list(self._changed):
            del self._changed[name]  # before it is read: it may change again
            is_sent = False
            try:
                is_sent = self._send_file(name, now=flushing)
            finally:
                if not is_sent:
                    self._changed.setdefault(name)
            sent.append(is_sent)
        has_checkpoints = self._lanes[0].flushed >= flushes
        sent.append(self._send_file(_RECORD, now=flushing and has_checkpoints))
        return has_checkpoints and all(sent), flushing and has_checkpoints and not all(sent)

    def _look(self) -> None:
        """Find files that were written by others, or by a driver that was killed."""
        self._looked_at = time.monotonic()
        for path, _ in sorted(files_below(self.root)):
            name = path.relative_to(self.root).as_posix()
            is_local = name.startswith((".", f"{CHECKPOINTS}/", *TEMPORARY)) or name in (_RECORD, LOCK)
            if not is_local and not path.name.startswith(INCOMING) and not _TEMPORARY.fullmatch(path.name):
                self.put(name)

    def _grown(self, name: str) -> _Growing:
        assert self._growing is not None, "_load() was called"
        return self._growing.setdefault(name, _Growing())

    def _send_growing(self, name: str, *, now: bool) -> bool:
        """Send the next piece of a file that grows; return whether the store has all of it."""
        have = self._grown(name)
        with have.mutex, suppress(FileNotFoundError), (self.root / name).open("rb") as file:
            size = file.seek(0, 2)
            if size < have.end:  # another file has its name now
                for number in range(1, have.pieces):
                    self.store.remove(_piece_name(name, number))
                have.end = have.pieces = 0
            elif size == have.end and have.pieces:
                return True
            pause_s = max(self._pace.every_file, have.pieces / _PIECES_A_S)
            if not now and size - have.end < _FULL_BYTES and time.monotonic() < have.sent_at + pause_s:
                return False
            file.seek(have.end)
            data = read = file.read(_PIECE_BYTES)
            if name.endswith(".jsonl") and (b"\n" in read or len(read) < _PIECE_BYTES):
                data = read[: read.rfind(b"\n") + 1]  # the writer takes half a line back if the disk is full
            if data or not have.pieces:
                self.store.write(_piece_name(name, have.pieces), data)
                have.end, have.pieces, have.sent_at = have.end + len(data), have.pieces + 1, time.monotonic()
            return not data or len(read) < _PIECE_BYTES // 2
        return True

    def _send_file(self, name: str, *, now: bool) -> bool:
        """Send a file if it has changed and is due; return whether the store has it as it is."""
        path = self.root / name
        with self._mutex if name == _RECORD else nullcontext():
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
            due_at = self._sent_at.get(name, float("-inf")) + max(every_s, state.st_size / _BYTES_PER_S)
            if not now and time.monotonic() < due_at:
                return False
            try:
                self.store.write(name, path)
            except StoreError:
                if not path.exists():
                    return True
                raise
            self._sent[name], self._sent_at[name] = fingerprint, time.monotonic()
            return True


def _piece_name(name: str, number: int) -> str:
    return f"{name}.{number:05d}" if number else name
