"""Distinguishes an unreadable image from a store that does not answer at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddptrain.errors import DdptrainError
from ddptrain.storage.store import StoreMissing, StoreUnreachable, Transient

# Errors after which a retry may help: a missing folder may be mounted again.
TRANSIENT = (Transient, StoreUnreachable, StoreMissing)
_NO_KEY = ".ddptrain-is-the-store-there"


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
