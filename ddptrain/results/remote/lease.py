"""The lock of a run in an object store: a lease, which the driver renews each minute. If the driver dies, it expires.

The driver that wrote the lock file last has the lease, until the file is STALE_S old by the store's clock. S3, Google
Cloud Storage and Azure write the file only if no other driver has written it (If-None-Match, If-Match). In a store
without conditional writes, the file is read and compared before it is written, so that two drivers may write at the
same moment, and the age of the file is measured by the clocks of the hosts.
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

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.host_identity import this_host
from ddptrain.log import Log
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import Limits, StoreError, Versioned, WriteConflict

_log = Log(__name__)
LOCK = "run.lock"
STALE_S = 180.0
_REFRESH_S = 60.0
_OWNED_S = 120.0  # so long after a renewal, no other driver can take the lease; below STALE_S, as clocks are coarse
_CLOSE_S = 5.0
_SETTLE_S = 1.0  # without conditional writes: after this time, two drivers that wrote at once read the same claim
_LIMITS = Limits(timeout_s=20.0)
_LARGEST_BYTES = 64 << 10


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

    def is_held(self, age_s: float) -> bool:
        """Return whether the driver is probably alive, given the age of its claim in seconds."""
        if self.released or abs(age_s) > STALE_S:
            return False
        return not self.machine or self.machine != _machine() or _is_alive(self.pid, self.born)

    @property
    def age_s(self) -> float:
        """The age in seconds by the clocks of two hosts."""
        return time.time() - self.time_s

    @classmethod
    def of_this_process(cls) -> Claim:
        """Return a new claim of this process."""
        born = _process_start(os.getpid())
        return cls(socket.gethostname(), os.getpid(), born, secrets.token_hex(8), time.time(), machine=_machine())


def claim_from(data: bytes | None) -> Claim | None:
    """Parse a lock file. Returns None for no file, and for one that is not a claim."""
    try:
        raw = json.loads(data or b"")
        return Claim(
            str(raw["host"]),
            int(raw["pid"]),
            float(raw["born"]),
            str(raw["token"]),
            float(raw["time_s"]),
            bool(raw["released"]),
            str(raw.get("machine", "")),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


class _LockFile:
    """The lock file. `weakness` says why the store has no conditional writes, or is ""."""

    def __init__(self, folder: RemoteFolder, probe: str) -> None:
        """`probe` names another file, for this process alone."""
        self._folder = folder.with_limits(_LIMITS)
        self.weakness = ""
        self._store_time_read_s = time.monotonic()
        try:
            self._store_time_s = self._folder.test_conditions(probe)
            self._store_time_read_s = time.monotonic()
        except StoreError as error:
            self.weakness = " ".join(str(error).split())[:200]

    def read(self) -> Versioned | None:
        """Return the file; None if it does not exist. Raises StoreError."""
        if not self.weakness:
            return self._folder.read_versioned(LOCK)
        data = self._folder.read(LOCK, _LARGEST_BYTES)
        return None if data is None else Versioned(data)

    def write(self, data: bytes, before: Versioned | None) -> Versioned:
        """Write the file if it is unchanged since `before`; None: if it does not exist.

        Raises WriteConflict if it has changed; StoreError.
        """
        if not self.weakness:
            return self._folder.write_versioned(LOCK, data, before)
        if self.read() != (before and Versioned(before.data)):
            raise WriteConflict(f"{self._folder.url}/{LOCK} was written by another process")
        self._folder.write(LOCK, data)
        return Versioned(data)

    def age_s(self, stored: Versioned, claim: Claim) -> float:
        """Return how many seconds ago a claim was written."""
        if stored.written_s is None:
            return claim.age_s
        return self._store_time_s + time.monotonic() - self._store_time_read_s - stored.written_s


class StoreLock:
    """Holds the lock of a run; `store` is the run's folder.

    After take(), `weakness` says why the store can't keep two drivers apart that start at once, or is "".
    """

    def __init__(self, store: RemoteFolder, *, refresh_s: float = _REFRESH_S, settle_s: float = _SETTLE_S) -> None:
        self.store = store
        self.claim = Claim.of_this_process()
        self._refresh_s, self._settle_s = refresh_s, settle_s
        self._opened: _LockFile | None = None
        self._last_written: Versioned | None = None  # the file as this process wrote it last
        self._owned_until_s = 0.0
        self._mutex = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost: Callable[[DdptrainError], None] = lambda error: None

    @property
    def _file(self) -> _LockFile:
        """The lock file, opened by the first use: that sends requests."""
        if self._opened is None:
            self._opened = _LockFile(self.store, f"{LOCK}.{self.claim.token}")
        return self._opened

    @property
    def weakness(self) -> str:
        """Why the store has no conditional writes; "" if it has."""
        return self._file.weakness

    def take(self, *, contested: bool) -> Claim | None:
        """Write the claim; return the previous claim. `contested`: another driver may take the lease at the same time.

        Raises RunLocked, StoreError.
        """
        self._stopped.clear()
        before = self._take_if_free()
        if contested and self.weakness:
            time.sleep(self._settle_s)
            holder = claim_from((self._file.read() or Versioned(b"")).data)
            if holder is not None and holder.token != self.claim.token:
                raise self._locked(holder, holder.age_s)
        return before

    def _take_if_free(self) -> Claim | None:
        """Write the claim if no other driver has the lease; return the previous claim. Raises RunLocked, StoreError."""
        while True:
            stored = self._file.read()
            before = claim_from(stored.data) if stored else None
            # A claim of this process is there if the answer to a write was lost.
            if stored and before and before.token != self.claim.token:
                age_s = self._file.age_s(stored, before)
                if before.is_held(age_s):
                    raise self._locked(before, age_s)
            with suppress(WriteConflict):  # another driver was faster: it holds the lock, or has released it already
                self._write(stored)
                holder = f"process {before.pid} on {before.host}" if before else None
                _log.info("lease of the run taken", store=self.store.url, before=holder)
                return before

    def keep(self, lost: Callable[[DdptrainError], None] = lambda error: None) -> None:
        """Renew the lease in a thread; `lost` is called once if another driver has taken the run."""
        self._lost = lost
        self._thread = threading.Thread(target=self._refresh, name="ddptrain-lock", daemon=True)
        self._thread.start()

    def assure(self) -> None:
        """Check that no other driver can have the lease. A lease that may have expired (SIGSTOP) is renewed first.

        Raises RunLocked, StoreError.
        """
        if self._stopped.is_set():
            raise RunLocked(f"this process does not hold run {self.store.url} any more")
        if _elapsed_s() > self._owned_until_s:
            self._renew()

    def release(self, *, forget: bool = False) -> None:
        """Stop renewing, and mark the lock as released; `forget` deletes the file. Raises nothing."""
        self._stopped.set()
        run_for(_CLOSE_S, lambda: self._release(forget))

    def _release(self, forget: bool) -> None:
        self._lost = lambda error: None
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_S)
        with suppress(DdptrainError):  # if this fails, the lease expires after STALE_S
            if forget:
                self._renew()
                self.store.remove(LOCK)
            else:
                self._write(self._last_written, released=True)

    def _refresh(self) -> None:
        pause_s = self._refresh_s
        while not self._stopped.wait(pause_s):
            try:
                self._renew()
                pause_s = self._refresh_s
            except RunLocked:
                return
            except StoreError:
                pause_s = self._refresh_s / 10  # the uploads warn about a store that does not answer

    def _renew(self) -> None:
        """Write the claim again, unless another driver has written its own. Raises RunLocked, StoreError."""
        with self._mutex:
            try:
                self._write(self._last_written)
            except WriteConflict:
                self._renew_changed()

    def _renew_changed(self) -> None:
        """Renew a file that has changed: another driver took it, it was deleted, or an answer to a write was lost."""
        try:
            stored = self._file.read()
            holder = claim_from(stored.data) if stored else None
            if stored and holder and holder.token != self.claim.token:
                raise self._locked(holder, self._file.age_s(stored, holder))
            self._write(stored)
        except (WriteConflict, RunLocked) as error:
            lost = error if isinstance(error, RunLocked) else RunLocked(f"run {self.store.url} was taken meanwhile")
            self._stopped.set()
            _log.info("lease of the run lost", store=self.store.url, error=lost)
            self._lost(lost)
            raise lost from None

    def _write(self, before: Versioned | None, *, released: bool = False) -> None:
        """Write the claim if the file is unchanged since `before`. Raises WriteConflict, StoreError."""
        with self._mutex:
            began_s = _elapsed_s()
            claim = dataclasses.replace(self.claim, time_s=time.time(), released=released)
            data = (json.dumps(dataclasses.asdict(claim), indent=1) + "\n").encode()
            self._last_written = self._file.write(data, before)
            self._owned_until_s = 0.0 if released else began_s + _OWNED_S

    def _locked(self, claim: Claim, age_s: float) -> RunLocked:
        return RunLocked(
            f"run {self.store.url} is held by process {claim.pid} on {claim.host}, last heartbeat "
            f"{max(0.0, age_s):.0f} s ago; wait for it (a driver without a heartbeat is considered dead after "
            f"{STALE_S:g} s), or choose another --run-id"
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
        return abs(_process_start(pid) - born) < 2.0  # the clock may have been set
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
