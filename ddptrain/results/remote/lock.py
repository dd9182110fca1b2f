"""The lock of a run in an object store: a lease that its driver renews each minute, so that it ends if the driver dies.

Who has written the lock file last has the lease, until it is STALE_S old by the store's clock. Host names and the
clocks of hosts decide nothing, unless the store has no conditional writes.
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
from ddptrain.hosts import this_host
from ddptrain.results.errors import StoreError
from ddptrain.results.remote.lock_file import Changed, LockFile, LookedAtFile, Seen, open_lock_file
from ddptrain.results.remote.store import Store

LOCK = "run.lock"
STALE_S = 180.0
_REFRESH_S = 60.0
_SURE_S = 120.0  # after a renewal: for so long nobody can have taken the lease; less than STALE_S, as clocks are coarse
_PARTING_S = 5.0
_SETTLE_S = 1.0  # without conditional writes: after it, of two drivers that wrote at once both see the last one


@dataclass(frozen=True, slots=True)
class Claim:
    """Who runs a run: a process of a host, since when its process lives, and when it last said so.

    machine: names the host and the space of process ids beyond doubt; "" where that is not known.
    """

    host: str
    pid: int
    born: float
    token: str
    time_s: float
    released: bool = False
    machine: str = ""

    def is_held(self, age_s: float) -> bool:
        """Whether that driver is at work, as far as can be told, if it was heard of so long ago."""
        if self.released or abs(age_s) > STALE_S:
            return False
        return not self.machine or self.machine != _machine() or _is_alive(self.pid, self.born)

    @property
    def age_s(self) -> float:
        """How long ago it was heard of, by the clocks of two hosts."""
        return time.time() - self.time_s

    @classmethod
    def of_this_process(cls) -> Claim:
        """A new claim."""
        born = _born(os.getpid())
        return cls(socket.gethostname(), os.getpid(), born, secrets.token_hex(8), time.time(), machine=_machine())


def claim_from(data: bytes | None) -> Claim | None:
    """The claim that a lock file holds; None for no file, and for one that can't be read."""
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


class StoreLock:
    """Holds a run's lock; `store` is the run's folder.

    After take(), `weakness` says why the store can't keep two drivers apart that start at once, or is "".
    """

    def __init__(self, store: Store, *, refresh_s: float = _REFRESH_S, settle_s: float = _SETTLE_S) -> None:
        self.store = store
        self.claim = Claim.of_this_process()
        self.weakness = ""
        self._refresh_s, self._settle_s = refresh_s, settle_s
        self._file: LockFile = LookedAtFile(store, LOCK)
        self._opened = False
        self._mine: Seen | None = None  # the file as this process has written it last
        self._sure_until_s = 0.0
        self._mutex = threading.RLock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost: Callable[[DdptrainError], None] = _nobody

    def take(self, *, contested: bool) -> Claim | None:
        """Write the claim; return the one that was there. `contested`: somebody else may be doing the same.

        Raises:
            RunLocked: a driver is at work.
            StoreError: the store can't be written.
        """
        if not self._opened:
            self._file, self.weakness = open_lock_file(self.store, LOCK, f"{LOCK}.{self.claim.token}")
            self._opened = True
        self._over.clear()
        before = self._won()
        if contested and self.weakness:
            time.sleep(self._settle_s)
            there = claim_from((self._file.read() or Seen(b"")).data)
            if there is not None and there.token != self.claim.token:
                raise self._locked(there, there.age_s)
        return before

    def _won(self) -> Claim | None:
        """Write the claim, and return the one before. Raises RunLocked, StoreError."""
        while True:
            seen = self._file.read()
            before = claim_from(seen.data) if seen else None
            # One of this process is there if the answer to a write was lost.
            if seen and before and before.token != self.claim.token:
                age_s = self._age_s(seen, before)
                if before.is_held(age_s):
                    raise self._locked(before, age_s)
            with suppress(Changed):  # another driver was faster: it holds the lock, or has released it already
                self._write(seen)
                return before

    def keep(self, lost: Callable[[DdptrainError], None]) -> None:
        """Renew the lease in a thread; `lost` is called, once, if another driver has taken the run."""
        self._lost = lost
        self._thread = threading.Thread(target=self._refresh, name="ddptrain-lock", daemon=True)
        self._thread.start()

    def assure(self) -> None:
        """Return if nobody else can have the lease; one that may have ended, as in a stopped process, is renewed first.

        Raises: RunLocked, StoreError.
        """
        if self._over.is_set():
            raise RunLocked(f"this process does not hold run {self.store.url} any more")
        if _elapsed_s() > self._sure_until_s:
            self._renew()

    def release(self, *, forget: bool = False) -> None:
        """Stop refreshing, and say that the run is free; `forget` deletes the file. Raises nothing."""
        self._over.set()
        briefly(lambda: self._release(forget), _PARTING_S)

    def _release(self, forget: bool) -> None:
        self._lost = _nobody
        if self._thread is not None:
            self._thread.join(timeout=_PARTING_S)
        with suppress(DdptrainError, Changed):  # else it goes stale by itself
            if forget:
                self._renew()
                self.store.remove(LOCK)
            else:
                self._write(self._mine, released=True)

    def _refresh(self) -> None:
        pause_s = self._refresh_s
        while not self._over.wait(pause_s):
            try:
                self._renew()
                pause_s = self._refresh_s
            except RunLocked:
                return
            except StoreError:
                pause_s = self._refresh_s / 10  # the uploads tell of a store that is away

    def _renew(self) -> None:
        """Write the claim anew, unless another one is there. Raises RunLocked, StoreError."""
        with self._mutex:
            try:
                self._write(self._mine)
            except Changed:
                self._look_again()

    def _look_again(self) -> None:
        """The file is not as it was: taken by another driver, deleted, or written by a request thought lost."""
        try:
            seen = self._file.read()
            there = claim_from(seen.data) if seen else None
            if seen and there and there.token != self.claim.token:
                raise self._locked(there, self._age_s(seen, there))
            self._write(seen)
        except (Changed, RunLocked) as error:
            lost = error if isinstance(error, RunLocked) else RunLocked(f"run {self.store.url} was taken meanwhile")
            self._over.set()
            self._lost(lost)
            raise lost from None

    def _write(self, before: Seen | None, *, released: bool = False) -> None:
        """Write the claim if the file is as it was before. Raises Changed, StoreError."""
        with self._mutex:
            began_s = _elapsed_s()
            claim = dataclasses.replace(self.claim, time_s=time.time(), released=released)
            data = (json.dumps(dataclasses.asdict(claim), indent=1) + "\n").encode()
            self._mine = self._file.write(data, before)
            self._sure_until_s = 0.0 if released else began_s + _SURE_S

    def _age_s(self, seen: Seen, claim: Claim) -> float:
        """How long ago a claim was written."""
        return claim.age_s if seen.written_s is None else self._file.now() - seen.written_s

    def _locked(self, claim: Claim, age_s: float) -> RunLocked:
        return RunLocked(
            f"run {self.store.url} is held by process {claim.pid} on {claim.host}, heard of {max(0.0, age_s):.0f} s "
            f"ago; wait for it (a driver that is gone is taken for dead after {STALE_S:g} s), or choose another "
            "--run-id"
        )


def briefly(work: Callable[[], None], seconds: float) -> None:
    """Do it, but wait for it only so long: the end of a run does not hang on a store that is away."""
    thread = threading.Thread(target=work, name="ddptrain-parting", daemon=True)
    thread.start()
    thread.join(timeout=seconds)


def _nobody(error: DdptrainError) -> None:
    """Whom the loss of a lock is told that nobody keeps."""


def _elapsed_s() -> float:
    """A clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _machine() -> str:
    """Names this machine, since it was started, and what its process ids count: containers often share a host name."""
    here = this_host()
    return f"{here.boot} {here.pids}" if here.boot and here.pids else ""


def _born(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).create_time())


def _is_alive(pid: int, born: float) -> bool:
    import psutil

    try:
        return abs(_born(pid) - born) < 2.0  # the clock may have been set
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
