"""The lock of a run in an object store: a file that its driver writes anew each minute, so that it goes stale."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.results.errors import StoreError
from ddptrain.results.store import Store

LOCK = "run.lock"
STALE_S = 180.0
_REFRESH_S = 60.0
_PARTING_S = 5.0
_SETTLE_S = 1.0  # after it, of two drivers that wrote at the same time both see the one that wrote last


@dataclass(frozen=True, slots=True)
class Claim:
    """Who runs a run: a process of a host, since when its process lives, and when it last said so."""

    host: str
    pid: int
    born: float
    token: str
    time_s: float
    released: bool = False

    @property
    def is_held(self) -> bool:
        """Whether that driver is at work, as far as can be told."""
        if self.released or abs(time.time() - self.time_s) > STALE_S:
            return False
        return self.host != socket.gethostname() or _is_alive(self.pid, self.born)

    @classmethod
    def of_this_process(cls) -> Claim:
        """A new claim."""
        return cls(socket.gethostname(), os.getpid(), _born(os.getpid()), secrets.token_hex(8), time.time())


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
        )
    except (ValueError, LookupError, TypeError):
        return None


class StoreLock:
    """Holds a run's lock; `store` is the run's folder."""

    def __init__(self, store: Store, *, refresh_s: float = _REFRESH_S, settle_s: float = _SETTLE_S) -> None:
        self.store = store
        self.claim = Claim.of_this_process()
        self._refresh_s, self._settle_s = refresh_s, settle_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, *, contested: bool) -> Claim | None:
        """Write the claim; return the one that was there. `contested`: somebody else may be doing the same.

        Raises:
            RunLocked: a driver is at work.
            StoreError: the store can't be written.
        """
        before = claim_from(self.store.read(LOCK))
        if before is not None and before.is_held:
            raise self._locked(before)
        self._write()
        if contested:
            time.sleep(self._settle_s)
            self._check()
        return before

    def keep(self, lost: Callable[[DdptrainError], None]) -> None:
        """Refresh the claim in a thread; `lost` is called, once, if another driver has taken the run."""
        self._thread = threading.Thread(target=self._refresh, args=(lost,), name="ddptrain-lock", daemon=True)
        self._thread.start()

    def release(self, *, forget: bool = False) -> None:
        """Stop refreshing, and say that the run is free; `forget` deletes the file. Raises nothing."""
        self._over.set()
        briefly(lambda: self._release(forget), _PARTING_S)

    def _release(self, forget: bool) -> None:
        if self._thread is not None:
            self._thread.join(timeout=_PARTING_S)
        try:
            self._check()
            if forget:
                self.store.remove(LOCK)
            else:
                self._write(released=True)
        except DdptrainError:
            return  # it goes stale by itself

    def _refresh(self, lost: Callable[[DdptrainError], None]) -> None:
        while not self._over.wait(self._refresh_s):
            try:
                self._check()
                self._write()
            except RunLocked as error:
                lost(error)
                return
            except StoreError:
                continue  # the uploads tell of a store that is away

    def _check(self) -> None:
        there = claim_from(self.store.read(LOCK))
        if there is not None and there.token != self.claim.token:
            raise self._locked(there)

    def _write(self, *, released: bool = False) -> None:
        claim = dataclasses.replace(self.claim, time_s=time.time(), released=released)
        self.store.write(LOCK, (json.dumps(dataclasses.asdict(claim), indent=1) + "\n").encode())

    def _locked(self, claim: Claim) -> RunLocked:
        ago = max(0.0, time.time() - claim.time_s)
        return RunLocked(
            f"run {self.store.url} is held by process {claim.pid} on {claim.host}, heard of {ago:.0f} s ago; wait for "
            f"it (a driver that is gone is taken for dead after {STALE_S:g} s), or choose another --run-id"
        )


def briefly(work: Callable[[], None], seconds: float) -> None:
    """Do it, but wait for it only so long: the end of a run does not hang on a store that is away."""
    thread = threading.Thread(target=work, name="ddptrain-parting", daemon=True)
    thread.start()
    thread.join(timeout=seconds)


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
