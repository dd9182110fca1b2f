"""Reads images from a store, with retries, concurrent requests, and an optional cache."""

from __future__ import annotations

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
_PER_PROCESS = {"_store", "_pool", "_pid", "_lock", "_has_read"}  # attributes that are not pickled
SURVIVE_A_FORK = {"file", "builtin"}  # protocols without connections
_TIMEOUT_S = 20.0  # of a request
_SAME_WRONG_SIZE = 3  # equal wrong sizes that show that the image was replaced since the listing
# Errors after which a retry may help: a missing folder may be mounted again.
TRANSIENT = (Transient, StoreUnreachable, StoreMissing)


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
    """Why an image can't be read, also later."""

    key: str
    reason: str


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
    _has_read: bool  # whether the store has returned an image in this process

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
        """Return the whole content of an image; transient errors are retried until the deadline.

        Raises StoreUnreachable if they last until then.
        """
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
        tries, began = self._tries, time.monotonic()
        pause_s, wrong_sizes = tries.first_wait_s, Counter[int]()
        while True:
            try:
                data = self._open().get(ref.key)
                self._has_read = True
                if ref.size_bytes < 0 or len(data) == ref.size_bytes:
                    return data
                wrong_sizes[len(data)] += 1
                problem = f"it has {len(data):,} bytes, and had {ref.size_bytes:,} when it was listed"
                if wrong_sizes[len(data)] == _SAME_WRONG_SIZE:
                    return ReadFailure(ref.key, problem)
            except NotFound:
                return ReadFailure(ref.key, "it is no longer there")
            except StoreMissing as error:
                if not self._has_read:  # a folder that this host never had will not appear
                    raise StoreUnreachable(str(error)) from None
                problem = str(error)
            except TRANSIENT as error:
                problem = str(error)
            except DdptrainError as error:  # such as forbidden: a retry can't help
                return ReadFailure(ref.key, str(error))
            left_s = began + tries.deadline_s - time.monotonic()
            if left_s <= 0:
                # The time of day makes two failures different: equal failures in a row are not restarted.
                clock = time.strftime("%H:%M:%S", time.localtime(time.time() - tries.deadline_s))
                raise StoreUnreachable(
                    f"{self._location.description} gives no {ref.key} since {clock} ({tries.deadline_s:g} s); the last "
                    f"error: {problem}; when it is back, failure.max_restarts or --resume continues from the newest "
                    "checkpoint"
                )
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1)))
            pause_s = min(2 * pause_s, tries.longest_wait_s)

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
        self._lock, self._has_read = threading.Lock(), False


def _finished(pending: dict[Future[bytes | ReadFailure], int]) -> Iterator[tuple[int, bytes | ReadFailure]]:
    """Wait for at least one result, and yield all that are done."""
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        yield pending.pop(future), future.result()
