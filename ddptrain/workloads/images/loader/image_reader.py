"""Reads images from a store, with retries, concurrent requests, and an optional cache."""

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
from ddptrain.storage.store import Limits, Location, NotFound, StoreMissing, StoreUnreachable, Transient
from ddptrain.workloads.images.data.synthetic import open_images
from ddptrain.workloads.images.loader.cache import Cache

REQUESTS = 32
_PER_PROCESS = {"_store", "_pool", "_pid", "_lock", "_health"}  # attributes that are not pickled
SURVIVE_A_FORK = {"file", "builtin"}  # protocols without connections
_TIMEOUT_S = 20.0  # of a request
_SAME_WRONG_SIZE = 3  # equal wrong sizes that show that the image was replaced since the listing
# Errors after which a retry may help: a missing folder may be mounted again.
TRANSIENT = (Transient, StoreUnreachable, StoreMissing)
_NO_KEY = ".ddptrain-is-the-store-there"


class ObjectSource(Protocol):
    """What a reader needs of a store."""

    def get(self, key: str) -> bytes:
        """Return the whole content of an object; blocks; must be thread-safe."""
        ...


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image as it was listed; the size is negative if the store did not report it.

    in_val_source: it is in the location of the validation images.
    """

    key: str
    size_bytes: int = -1
    version: str = ""
    in_val_source: bool = False


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Why an image can't be read. `away`: the reason, if the whole store does not answer; "" otherwise."""

    key: str
    reason: str
    away: str = ""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a read is tried again, and the wait between two attempts.

    The wait doubles up to `longest_wait_s`; each is multiplied by a random number from 0.5 to 1.
    """

    deadline_s: float = 60.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0


def _open_store(location: Location) -> ObjectSource:
    return open_images(location, Limits(_TIMEOUT_S))


class Reader:
    """Reads images of one location; thread-safe and picklable.

    The store is opened by the first read in a process, so that it is never opened before a fork.
    """

    _store: ObjectSource | None
    _pool: ThreadPoolExecutor | None
    _pid: int  # of the process that opened the store; 0 for none
    _lock: threading.Lock
    _health: StoreHealth

    def __init__(
        self,
        location: Location,
        cache: Cache | None = None,
        tries: RetryPolicy = RetryPolicy(),
        opener: Callable[[Location], ObjectSource] = _open_store,
    ) -> None:
        self._location, self._cache, self._tries, self._opener = location, cache, tries, opener
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _PER_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._reset()

    def read(self, ref: ImageRef) -> bytes | ReadFailure:
        """Return the whole content of an image; transient errors are retried until the deadline."""
        if self._cache is not None:
            known = self._cache.get(self._location.url, ref.key, ref.version)
            if known is not None and (ref.size_bytes < 0 or ref.size_bytes == len(known)):
                return known
        data = self._fetch(ref)
        if self._cache is not None and isinstance(data, bytes):
            self._cache.put(self._location.url, ref.key, ref.version, data)
        return data

    def read_all(self, refs: Iterable[ImageRef], requests: int = REQUESTS) -> Iterator[tuple[int, bytes | ReadFailure]]:
        """(position, content) of each image, as they arrive; at most 2 x `requests` results wait to be taken."""
        self._open()  # discards the pool of a parent process: its threads do not exist here
        pending: dict[Future[bytes | ReadFailure], int] = {}
        pool = self._pool = self._pool or ThreadPoolExecutor(requests, thread_name_prefix="ddptrain-read")
        try:
            for place, ref in enumerate(refs):
                if len(pending) >= 2 * requests:
                    yield from _finished(pending)
                pending[pool.submit(self.read, ref)] = place
            while pending:
                yield from _finished(pending)
        finally:
            for future in pending:
                future.cancel()

    def _fetch(self, ref: ImageRef) -> bytes | ReadFailure:
        tries = self._tries
        began, pause_s, is_last = time.monotonic(), tries.first_wait_s, False
        wrong_sizes: Counter[int] = Counter()
        while True:
            asked = time.monotonic()
            result = self._try(ref, wrong_sizes)
            if not isinstance(result, str):
                return result
            left_s = began + tries.deadline_s - time.monotonic()
            if left_s <= 0:
                failure = ReadFailure(ref.key, f"tried for {tries.deadline_s:g} s; the last error: {result}")
                if is_last or self._health.last_answer >= asked:
                    return failure
                if is_last := self._health.probe(asked, self._get):
                    continue  # the image may be readable again
                silent_since = max(began, self._health.last_answer)
                left_s = silent_since + tries.deadline_s - time.monotonic()
                if left_s <= 0:
                    return dataclasses.replace(failure, away=self._away(silent_since, result))
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1)))
            pause_s = min(2 * pause_s, tries.longest_wait_s)

    def _try(self, ref: ImageRef, wrong_sizes: Counter[int]) -> bytes | ReadFailure | str:
        """The content, or why it is unreadable; a plain str means that a retry may help. Updates `wrong_sizes`."""
        try:
            data = self._get(ref.key)
        except NotFound:
            return ReadFailure(ref.key, "it is no longer there")
        except TRANSIENT as error:
            reason = str(error)
            # A folder that this process has never read from will not appear.
            lasts = isinstance(error, StoreMissing) and not self._health.has_read
            return ReadFailure(ref.key, reason, away=reason) if lasts else reason
        except DdptrainError as error:  # such as forbidden: a retry can't help
            return ReadFailure(ref.key, str(error))
        if ref.size_bytes < 0 or len(data) == ref.size_bytes:
            return data
        wrong_sizes[len(data)] += 1
        reason = f"it has {len(data):,} bytes, and had {ref.size_bytes:,} when it was listed"
        return ReadFailure(ref.key, reason) if wrong_sizes[len(data)] == _SAME_WRONG_SIZE else reason

    def _get(self, key: str) -> bytes:
        try:
            data = self._open().get(key)
        except TRANSIENT:
            raise
        except DdptrainError:
            self._health.record_answer()
            raise
        self._health.record_answer(key)
        return data

    def _away(self, since: float, last_error: str) -> str:
        """Return the error message for a store that has been silent since that time.monotonic()."""
        silent_s = time.monotonic() - since
        # The time of day makes two failures different: equal failures in a row are not restarted.
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        silent = f"no request has succeeded since {clock} ({silent_s:.0f} s)"
        return f"{self._location.description} does not answer: {silent}; the last error: {last_error}"

    def _open(self) -> ObjectSource:
        """Return the store of this process. Raises RuntimeError after a fork of a process that had connections."""
        if self._pid not in {0, os.getpid()}:
            if self._location.protocol not in SURVIVE_A_FORK:
                raise RuntimeError(
                    "this process was forked from one that has read images, whose connections don't work here: give "
                    'the DataLoader multiprocessing_context="forkserver"'
                )
            self._reset()
        with self._lock:
            if self._store is None:
                self._store = self._opener(self._location)
                self._pid = os.getpid()
            return self._store

    def _reset(self) -> None:
        """Reset the attributes that belong to one process."""
        self._store, self._pool, self._pid = None, None, 0
        self._lock, self._health = threading.Lock(), StoreHealth()


def _finished(pending: dict[Future[bytes | ReadFailure], int]) -> Iterator[tuple[int, bytes | ReadFailure]]:
    """Wait for at least one result, and yield all that are done."""
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        yield pending.pop(future), future.result()


class StoreHealth:
    """The last time that a store answered a request of this process; thread-safe.

    Errors such as "not found" or "forbidden" are answers, too; transient errors are not.
    """

    def __init__(self) -> None:
        self._probing = threading.Lock()
        self.last_answer = time.monotonic()  # at first, the time of the construction
        self._failed_probe = -1.0  # start of our newest probe without an answer
        self._key = _NO_KEY

    @property
    def has_read(self) -> bool:
        """Whether the store has returned an image."""
        return self._key != _NO_KEY

    def record_answer(self, key: str = "") -> None:
        """Record an answer; `key` is that of an image that it returned."""
        self.last_answer, self._key = time.monotonic(), key or self._key

    def probe(self, since: float, get: Callable[[str], object]) -> bool:
        """Return whether the store answers a probe for an image that it returned before.

        One thread probes for all. There is no probe if an answer, or an unanswered probe, is newer than `since`. `get`
        records its answers with `record_answer`.
        """
        with self._probing:
            if self.last_answer >= since or self._failed_probe >= since:
                return self.last_answer >= since
            began = time.monotonic()
            try:
                get(self._key)
            except TRANSIENT:
                self._failed_probe = began
                return False
            except DdptrainError:
                pass
            return True
