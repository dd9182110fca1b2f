"""One owner per model: the lock that a retraining holds, and the request to hand it over.

With `overlap: allow` each retraining has a lock of its own instead.

In a folder the lock is held with flock, in an object store it is a lease (results/remote/lease.py). Both end when the
process that holds them dies. `overlap: replace` writes a request that the owner looks for every few seconds; the owner
then ends like after SIGTERM: it saves a checkpoint first.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.log import Log
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.results import ownership
from ddptrain.results.errors import ResultsError
from ddptrain.results.remote.lease import LOCK, StoreLock, claim_from
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import StoreError

_log = Log(__name__)
_REQUEST = "replace"
_LOOK_EVERY_S = 2.0
_TRY_EVERY_S = 1.0


class _FolderLock:
    """A lock file on this machine, or on a network file system with locks; StoreLock has the same methods."""

    def __init__(self, store: OwnFolder, folder: str) -> None:
        self._store, self._key = store, f"{folder}/{LOCK}"
        self._path = Path(store.location.url, self._key)
        self._descriptor = -1

    def take(self) -> None:
        try:
            self._store.make_parent(self._key)
        except OSError as error:
            raise StoreError(f"cannot write into {self._path.parent}: {error.strerror}; see models.dir") from error
        try:
            self._descriptor = ownership.take(self._path)
        except ResultsError as error:
            raise ResultsError(str(error).replace("--runs-dir", "--models-dir")) from error

    def keep(self, lost: Callable[[DdptrainError], None]) -> None:
        """Nobody can take a file lock away."""

    def assure(self) -> None:
        """Nobody can take a file lock away."""

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ModelOwner:
    """Holds the lock of a model, and ends this process when another one asks to replace it."""

    def __init__(self, registry: RemoteFolder, model: str) -> None:
        """registry: the folder of all models (ModelRegistry.folder)."""
        self._folder = registry.below(model).below("retrainings")
        self.model = model
        self.replaced_by = ""  # who asked for the model, as "process 12 on host"
        self.lost: DdptrainError | None = None
        self._lock: _FolderLock | StoreLock | None = None
        self._over = threading.Event()

    @contextmanager
    def owned(self, overlap: str, wait_s: float, tell: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock for the block, which other processes may end with SIGTERM through a request.

        overlap: skip, wait or replace; with allow, nothing is held before take_record() (see RetrainConfig).

        Raises:
            RunLocked: another process holds the lock, with wait and replace for longer than `wait_s` seconds.
            StoreError, ResultsError: the lock cannot be taken.
        """
        try:
            if overlap != "allow":
                self._take(overlap, wait_s, tell)
                with suppress(StoreError):  # a request that stays only ends this process, which is safe
                    self._folder.remove(_REQUEST)
                threading.Thread(target=self._watch, name="ddptrain-replace", daemon=True).start()
            yield
        finally:
            self._over.set()
            self.release()

    @property
    def holds_lock(self) -> bool:
        """Whether this process holds the lock of the model, or of a retraining."""
        return self._lock is not None

    def take_record(self, number: int) -> bool:
        """Hold the lock of one retraining, for `overlap: allow`; return False if another process holds it.

        Raises StoreError, ResultsError.
        """
        lock = _lock_in(_record_folder(self._folder, number))
        try:
            lock.take()
        except RunLocked:
            return False
        self.release()
        self._hold(lock)
        return True

    def assure(self) -> None:
        """Check that this process still owns the model, or the retraining. Raises RunLocked, StoreError."""
        if self._lock is not None:
            self._lock.assure()

    def release(self) -> None:
        """Release the lock, if one is held."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _hold(self, lock: _FolderLock | StoreLock) -> None:
        self._lock = lock
        lock.keep(self._lose)

    def _take(self, overlap: str, wait_s: float, tell: Callable[[str], None]) -> None:
        """Take the lock; with wait and replace try again for `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        is_reported = False
        lock = _lock_in(self._folder)
        while True:
            try:
                lock.take()
                self._hold(lock)
                return
            except RunLocked:
                busy = f"model {self.model} is being retrained by {self._holder() or 'another process'}"
            if overlap == "skip":
                raise RunLocked(busy)
            # Each new owner deletes the request, so that of a second waiting start as well: it asks again.
            if overlap == "replace" and self._folder.read(_REQUEST) is None:
                self._folder.write(_REQUEST, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            if not is_reported:
                is_reported = True
                tell(f"{busy}; {'asked it to save and end' if overlap == 'replace' else 'waiting for its end'}")
            if time.monotonic() >= deadline:
                raise RunLocked(f"{busy} and did not end within {wait_s:g} s")
            time.sleep(_TRY_EVERY_S)

    def _holder(self) -> str:
        """Return the process that holds the lock, as "process 12 on host"; "" if unknown."""
        store, claim = self._folder.store, None
        if isinstance(store, OwnFolder):
            return ownership.holder(Path(store.location.url, self._folder.path, LOCK))
        with suppress(StoreError):
            claim = claim_from(self._folder.read(LOCK))
        return f"process {claim.pid} on {claim.host}" if claim else ""

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            try:
                asked = self._folder.read(_REQUEST)
            except StoreError:
                continue  # the store does not answer: the stages report it
            if asked is not None:
                self.replaced_by = asked.decode(errors="replace").strip() or "another process"
                _log.info("asked to hand the model over", model=self.model, by=self.replaced_by)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _lose(self, error: DdptrainError) -> None:
        self.lost = error
        os.kill(os.getpid(), signal.SIGTERM)


def is_being_retrained(registry: RemoteFolder, model: str, number: int | None = None) -> bool:
    """Return whether a process holds the lock of the model, or of the retraining of that number (`overlap: allow`).

    False if this host cannot see it. It does not take the lock, which would disturb a starting retraining. Raises
    StoreError.
    """
    folder = registry.below(model).below("retrainings")
    if number is not None:
        folder = _record_folder(folder, number)
    if isinstance(folder.store, OwnFolder):
        return bool(ownership.is_held(Path(folder.store.location.url, folder.path, LOCK)))
    claim = claim_from(folder.read(LOCK))
    return claim is not None and claim.is_held()


def _record_folder(retrainings: RemoteFolder, number: int) -> RemoteFolder:
    return retrainings.below(f"{number:06d}")


def _lock_in(folder: RemoteFolder) -> _FolderLock | StoreLock:
    return _FolderLock(folder.store, folder.path) if isinstance(folder.store, OwnFolder) else StoreLock(folder)
