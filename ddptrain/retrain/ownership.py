"""One owner for each model: a lock file in a folder, a lease in an object store. Both end with their process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.results import ownership
from ddptrain.results.errors import ResultsError
from ddptrain.results.remote.lease import LOCK, StoreLock, claim_from
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import Store, StoreError

_TRY_EVERY_S = 1.0


class ModelOwner:
    """Holds the lock of a model."""

    def __init__(self, registry: Store, model: str) -> None:
        """registry: the folder of all models (ModelRegistry.folder)."""
        self._folder = registry.below(model).below("retrainings")
        self.model = model
        self.lost: DdptrainError | None = None  # why the lease was lost; then this process gets SIGTERM
        self.holds_lock = False
        self._lease: StoreLock | None = None

    @contextmanager
    def owned(self, wait_s: float, report: Callable[[str], None], stop_other: Callable[[], None]) -> Iterator[None]:
        """Hold the lock for the block.

        wait_s: how long to wait for another process; stop_other is called before each attempt. report: shows a line.

        Raises RunLocked if another process holds the lock for longer; StoreError, ResultsError.
        """
        deadline, waits = time.monotonic() + wait_s, False
        while True:
            try:
                release = self._take()
                break
            except RunLocked:
                busy = f"model {self.model} is being retrained by {self._holder() or 'another process'}"
            if wait_s > 0 and not waits:
                waits = True
                report(f"{busy}; waiting for its end")
            if time.monotonic() >= deadline:
                raise RunLocked(f"{busy} and did not end within {wait_s:g} s" if waits else busy)
            stop_other()
            time.sleep(_TRY_EVERY_S)
        self.holds_lock = True
        try:
            yield
        finally:
            self.holds_lock = False
            release()

    def assure(self) -> None:
        """Check that this process still owns the model. Raises RunLocked, StoreError."""
        if self._lease is not None:
            self._lease.assure()

    def _take(self) -> Callable[[], None]:
        """Take the lock; return what releases it. Raises RunLocked, StoreError, ResultsError."""
        if isinstance(self._folder, ObjectStore):
            self._lease = StoreLock(self._folder)
            self._lease.take()
            self._lease.keep(self._lose)
            return self._lease.release
        assert isinstance(self._folder, OwnFolder)
        path = self._folder.folder / LOCK
        try:
            self._folder.make_parent(LOCK)
        except OSError as error:
            raise StoreError(f"cannot write into {path.parent}: {error.strerror}; see models.dir") from error
        owner = ownership.Owner(path)
        try:
            owner.take()
        except ResultsError as error:
            raise ResultsError(str(error).replace("--runs-dir", "--models-dir")) from error
        return owner.release

    def _holder(self) -> str:
        """Return the process that holds the lock, as "process 12 on host"; "" if unknown."""
        if isinstance(self._folder, OwnFolder):
            return ownership.holder(self._folder.folder / LOCK)
        with suppress(StoreError):
            claim = claim_from(self._folder.read(LOCK))
            return f"process {claim.pid} on {claim.host}" if claim else ""
        return ""

    def _lose(self, error: DdptrainError) -> None:
        self.lost = error
        os.kill(os.getpid(), signal.SIGTERM)


def is_being_retrained(registry: Store, model: str) -> bool:
    """Return whether a process holds the lock of the model; False if this host cannot see it. Raises StoreError."""
    folder = registry.below(model).below("retrainings")
    if isinstance(folder, OwnFolder):
        return bool(ownership.is_held(folder.folder / LOCK))
    claim = claim_from(folder.read(LOCK))
    return claim is not None and claim.is_held()
