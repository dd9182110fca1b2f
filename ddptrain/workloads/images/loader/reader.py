"""Images read from a store: many requests at once, tried again while that helps, from the cache where there is one."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from ddptrain.errors import DdptrainError
from ddptrain.storage.base import Limits, Location, NotFound, StoreMissing, open_store
from ddptrain.workloads.images.loader.cache import Cache
from ddptrain.workloads.images.loader.store_health import PASSES, Presence

REQUESTS = 32
_OF_A_PROCESS = {"_store", "_pool", "_pid", "_lock", "_presence"}
SURVIVE_A_FORK = {"file", "builtin"}  # protocols
_TIMEOUT_S = 20.0  # of a request
_SAME_WRONG_SIZE = 3  # answers: the image is another one than was listed


class Gets(Protocol):
    """What is read from: `storage.base.Store`, or a test's own."""

    def get(self, key: str) -> bytes:
        """The whole of an object; blocks, and may be called by many threads."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """An image as it was listed; its size is negative where the store did not tell it.

    in_val_source: it lies in the validation folder that has a location of its own.
    """

    key: str
    size_bytes: int = -1
    version: str = ""
    in_val_source: bool = False


@dataclass(frozen=True, slots=True)
class ReadFault:
    """Why an image can't be had, in a few words; `away` tells of the store, where that is not there at all."""

    key: str
    reason: str
    away: str = ""


@dataclass(frozen=True, slots=True)
class Tries:
    """How long an image is tried for, and the waits between: they double, and each is drawn from half to all of it."""

    deadline_s: float = 60.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0


def _open_store(location: Location) -> Gets:
    return open_store(location, Limits(_TIMEOUT_S))


class Reader:
    """Reads images from one location; any number of threads may use it.

    The store is opened by the first read of a process, never before a fork. A reader may be pickled.
    """

    _store: Gets | None
    _pool: ThreadPoolExecutor | None
    _pid: int  # of the process that these belong to; 0 for none
    _lock: threading.Lock
    _presence: Presence

    def __init__(
        self,
        location: Location,
        cache: Cache | None = None,
        tries: Tries = Tries(),
        opener: Callable[[Location], Gets] = _open_store,
    ) -> None:
        self._location, self._cache, self._tries, self._opener = location, cache, tries, opener
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_A_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._forget()

    def read(self, wanted: Wanted) -> bytes | ReadFault:
        """One image, whole; what goes wrong for a while is tried again until the deadline."""
        if self._cache is not None:
            known = self._cache.get(self._location.url, wanted.key, wanted.version)
            if known is not None and (wanted.size_bytes < 0 or wanted.size_bytes == len(known)):
                return known
        data = self._fetch(wanted)
        if self._cache is not None and isinstance(data, bytes):
            self._cache.put(self._location.url, wanted.key, wanted.version, data)
        return data

    def read_all(self, wanted: Iterable[Wanted], requests: int = REQUESTS) -> Iterator[tuple[int, bytes | ReadFault]]:
        """(place, image) of each that is wanted, as they come; at most twice `requests` wait to be taken."""
        self._open()  # here: the pool of a process that has forked this one is as dead here as its connections
        pending: dict[Future[bytes | ReadFault], int] = {}
        pool = self._pool = self._pool or ThreadPoolExecutor(requests, thread_name_prefix="ddptrain-read")
        try:
            for place, one in enumerate(wanted):
                if len(pending) >= 2 * requests:
                    yield from _finished(pending)
                pending[pool.submit(self.read, one)] = place
            while pending:
                yield from _finished(pending)
        finally:
            for future in pending:
                future.cancel()

    def _fetch(self, wanted: Wanted) -> bytes | ReadFault:
        tries = self._tries
        began, pause_s, is_last = time.monotonic(), tries.first_wait_s, False
        wrong_sizes: Counter[int] = Counter()
        while True:
            asked = time.monotonic()
            found = self._try(wanted, wrong_sizes)
            if not isinstance(found, str):
                return found
            left_s = began + tries.deadline_s - time.monotonic()
            if left_s <= 0:
                fault = ReadFault(wanted.key, f"tried for {tries.deadline_s:g} s, the last time: {found}")
                if is_last or self._presence.heard >= asked:
                    return fault
                if is_last := self._presence.answers(asked, self._get):
                    continue  # it may have come back since
                silent_since = max(began, self._presence.heard)
                left_s = silent_since + tries.deadline_s - time.monotonic()
                if left_s <= 0:
                    return dataclasses.replace(fault, away=self._away(silent_since, found))
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1)))
            pause_s = min(2 * pause_s, tries.longest_wait_s)

    def _try(self, wanted: Wanted, wrong_sizes: Counter[int]) -> bytes | ReadFault | str:
        """The image, or why it can't be had; a mere str where another try may help. `wrong_sizes` are of all tries."""
        try:
            data = self._get(wanted.key)
        except NotFound:
            return ReadFault(wanted.key, "it is no longer there")
        except PASSES as error:
            said = str(error)
            # A folder that this process has never seen there will not come back.
            lasts = isinstance(error, StoreMissing) and not self._presence.has_given
            return ReadFault(wanted.key, said, away=said) if lasts else said
        except DdptrainError as error:  # forbidden, say: no second try would help
            return ReadFault(wanted.key, str(error))
        if wanted.size_bytes < 0 or len(data) == wanted.size_bytes:
            return data
        wrong_sizes[len(data)] += 1
        reason = f"it has {len(data):,} bytes, and had {wanted.size_bytes:,} when it was listed"
        return ReadFault(wanted.key, reason) if wrong_sizes[len(data)] == _SAME_WRONG_SIZE else reason

    def _get(self, key: str) -> bytes:
        try:
            data = self._open().get(key)
        except PASSES:
            raise
        except DdptrainError:
            self._presence.hear()
            raise
        self._presence.hear(key)
        return data

    def _away(self, since: float, said: str) -> str:
        """What is told of a store that has been silent since that time.monotonic()."""
        silent_s = time.monotonic() - since
        # The time of day, so that two failures in a row are not the same one, which no restart would help.
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        silent = f"no request has succeeded since {clock} ({silent_s:.0f} s)"
        return f"{self._location.words} is away: {silent}, the last one: {said}"

    def _open(self) -> Gets:
        """The store of this process. Raises RuntimeError in one that was forked from one that has read."""
        if self._pid not in {0, os.getpid()}:
            if self._location.protocol not in SURVIVE_A_FORK:
                raise RuntimeError(
                    "this process was forked from one that has read images, whose connections don't work here: give "
                    'the DataLoader multiprocessing_context="forkserver"'
                )
            self._forget()
        with self._lock:
            if self._store is None:
                self._store = self._opener(self._location)
                self._pid = os.getpid()
            return self._store

    def _forget(self) -> None:
        """Be as new."""
        self._store, self._pool, self._pid = None, None, 0
        self._lock, self._presence = threading.Lock(), Presence()


class Readers:
    """Reads images of two locations: those to train on, and those to validate with."""

    def __init__(self, source: Reader, val_source: Reader) -> None:
        self._source, self._val_source = source, val_source

    def read(self, wanted: Wanted) -> bytes | ReadFault:
        """One image, from the location that it lies in."""
        return (self._val_source if wanted.in_val_source else self._source).read(wanted)


def _finished(pending: dict[Future[bytes | ReadFault], int]) -> Iterator[tuple[int, bytes | ReadFault]]:
    """Waits for one at least, and gives all that are there."""
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        yield pending.pop(future), future.result()
