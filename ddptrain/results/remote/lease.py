"""The lock of a run in an object store: a lease, which the driver renews each minute. If the driver dies, it expires.

The driver that wrote the lock file last has the lease, until the file is STALE_S old by the store's clock. The store
writes the file only if no other driver has written it (If-None-Match, If-Match).
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from pydantic import TypeAdapter

from ddptrain.errors import DdptrainError, RunLocked, UsageError
from ddptrain.host_identity import this_host
from ddptrain.log import Log
from ddptrain.results.ownership import Owner
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import Limits, NoConditionalWrites, StoreError, Versioned, WriteConflict

_log = Log(__name__)
LOCK = "run.lock"
STALE_S = 180.0
_REFRESH_S = 60.0
_OWNED_S = 120.0  # so long after a renewal, no other driver can take the lease; below STALE_S, as clocks are coarse
_CLOSE_S = 5.0
_LIMITS = Limits(timeout_s=20.0)


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of a lock file: a driver, when its process began, and when it last renewed the lease.

    machine: identifies the host and its process ids; "" if that is not known. Times are seconds since 1970.
    """

    host: str
    pid: int
    born: float
    token: str
    time_s: float
    released: bool = False
    machine: str = ""

    def is_held(self, age_s: float | None = None) -> bool:
        """Return whether the driver is probably alive; age_s: of its claim, by default by the clocks of two hosts."""
        age_s = time.time() - self.time_s if age_s is None else age_s
        if self.released or abs(age_s) > STALE_S:
            return False
        return not self.machine or self.machine != _machine() or _is_alive(self.pid, self.born)

    @classmethod
    def of_this_process(cls) -> Claim:
        """Return a new claim of this process."""
        born = _process_start(os.getpid())
        return cls(socket.gethostname(), os.getpid(), born, secrets.token_hex(8), time.time(), machine=_machine())


_CLAIM = TypeAdapter(Claim)


def claim_from(data: bytes | None) -> Claim | None:
    """Parse a lock file. Returns None for no file, and for one that is not a claim."""
    with suppress(ValueError):
        return _CLAIM.validate_json(data or b"")
    return None


class Lease(Owner):
    """Holds the lock of a run; `store` is the run's folder. before: the claim of the previous owner, after take()."""

    def __init__(self, store: ObjectStore, *, refresh_s: float = _REFRESH_S) -> None:
        super().__init__()
        self.store, self.every_s = store, refresh_s
        self.before: Claim | None = None
        self.claim = Claim.of_this_process()
        self._folder = store.with_limits(_LIMITS)
        self._clock: tuple[float, float] | None = None  # the store's time, and when it was that by the monotonic clock
        self._last_written: Versioned | None = None  # the file as this process wrote it last
        self._owned_until_s = 0.0
        self._mutex = threading.RLock()

    def take(self) -> Self:
        """See Owner: write the claim if no other process has the lease."""
        self._stopped.clear()
        if self._clock is None:
            try:
                self._clock = self._folder.test_conditions(f"{LOCK}.{self.claim.token}"), time.monotonic()
            except NoConditionalWrites as error:
                raise UsageError(
                    f"{self.store.url} can't be used: {error}; runs need a store with conditional writes, as S3, "
                    "Google Cloud Storage, Azure, MinIO, R2 or SeaweedFS"
                ) from None
        while True:
            stored = self._folder.read_versioned(LOCK)
            before = claim_from(stored.data) if stored else None
            # A claim of this process is there if the answer to a write was lost.
            if stored and before and before.token != self.claim.token and before.is_held(self._age_s(stored)):
                raise self._locked(before, stored)
            with suppress(WriteConflict):  # another driver was faster: it holds the lock, or has released it already
                self._write(stored)
                holder = f"process {before.pid} on {before.host}" if before else None
                _log.info("lease of the run taken", store=self.store.url, before=holder)
                self.before = before
                return self

    def assure(self) -> None:
        """See Owner: a lease that may have expired (SIGSTOP) is renewed first."""
        if self._stopped.is_set():
            raise RunLocked(f"this process does not hold run {self.store.url} any more")
        if _elapsed_s() > self._owned_until_s:
            self.renew()

    def holder(self) -> str:
        """See Owner."""
        claim = None
        with suppress(StoreError):
            claim = claim_from(self.store.read(LOCK))
        return f"process {claim.pid} on {claim.host}" if claim else ""

    def release(self, *, forget: bool = False) -> None:
        """Stop renewing, and mark the lock as released; `forget` deletes the file. Raises nothing."""
        self._stopped.set()
        run_for(_CLOSE_S, lambda: self._release(forget))

    def _release(self, forget: bool) -> None:
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_S)
        with suppress(DdptrainError):  # if this fails, the lease expires after STALE_S
            if forget:
                self.renew()
                self.store.remove(LOCK)
            else:
                self._write(self._last_written, released=True)

    def renew(self) -> None:
        """See Owner: write the claim again, unless another process has written its own."""
        with self._mutex:
            try:
                try:
                    self._write(self._last_written)
                except WriteConflict:  # another driver took it, it was deleted, or an answer to a write was lost
                    stored = self._folder.read_versioned(LOCK)
                    holder = claim_from(stored.data) if stored else None
                    if stored and holder and holder.token != self.claim.token:
                        raise self._locked(holder, stored) from None
                    self._write(stored)
            except (WriteConflict, RunLocked) as error:
                lost = error if isinstance(error, RunLocked) else RunLocked(f"run {self.store.url} was taken meanwhile")
                _log.info("lease of the run lost", store=self.store.url, error=lost)
                self._lose(lost)
                raise lost from None

    def _write(self, before: Versioned | None, *, released: bool = False) -> None:
        """Write the claim if the file is unchanged since `before`. Raises WriteConflict, StoreError."""
        with self._mutex:
            began_s = _elapsed_s()
            claim = dataclasses.replace(self.claim, time_s=time.time(), released=released)
            data = (json.dumps(dataclasses.asdict(claim), indent=1) + "\n").encode()
            self._last_written = self._folder.write_versioned(LOCK, data, before)
            self._owned_until_s = 0.0 if released else began_s + _OWNED_S

    def _age_s(self, stored: Versioned) -> float:
        """Return how many seconds ago the file was written, by the store's clock."""
        assert self._clock is not None and stored.written_s is not None, "take() has seen that the store has times"
        return self._clock[0] + time.monotonic() - self._clock[1] - stored.written_s

    def _locked(self, claim: Claim, stored: Versioned) -> RunLocked:
        return RunLocked(
            f"run {self.store.url} is held by process {claim.pid} on {claim.host}, last heartbeat "
            f"{max(0.0, self._age_s(stored)):.0f} s ago; wait for it (a driver without a heartbeat is considered dead "
            f"after {STALE_S:g} s), or choose another --run-id"
        )


def run_for(seconds: float, work: Callable[[], None]) -> None:
    """Call `work` in a thread, and wait at most `seconds`, so that a silent store does not block the end of a run."""
    thread = threading.Thread(target=work, name="ddptrain-last-upload", daemon=True)
    thread.start()
    thread.join(timeout=seconds)


def _elapsed_s() -> float:
    """Return seconds of a monotonic clock that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _machine() -> str:
    """Identify this boot of this machine and its process id namespace: containers often share a host name."""
    host = this_host()
    return f"{host.boot} {host.pids}" if host.boot and host.pids else ""


def _process_start(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).create_time())


def _is_alive(pid: int, born: float) -> bool:
    import psutil

    try:
        return abs(_process_start(pid) - born) < 2.0
    except psutil.Error as error:
        return not isinstance(error, psutil.NoSuchProcess)
