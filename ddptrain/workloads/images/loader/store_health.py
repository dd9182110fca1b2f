"""Whether a store is there: what tells an image that can't be had from a store that is away as a whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddptrain.errors import DdptrainError
from ddptrain.storage.base import StoreMissing, StoreUnreachable, Transient

# Errors after which another try may help: a folder that was there may be mounted again.
PASSES = (Transient, StoreUnreachable, StoreMissing)
_NO_KEY = ".ddptrain-asks-whether-the-store-is-there"


class Presence:
    """When a store has last answered one of this process's requests; any number of threads tell it, and ask.

    That there is no such image, or that it is forbidden, is an answer too; errors that pass are none.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._heard = time.monotonic()  # nobody has asked before
        self._vain = -1.0  # begin of the newest question of ours that had no answer
        self._key = _NO_KEY

    @property
    def heard(self) -> float:
        """When that was, as time.monotonic has it; at first, when this began."""
        return self._heard

    @property
    def has_given(self) -> bool:
        """Whether the store has given an image."""
        return self._key != _NO_KEY

    def hear(self, key: str = "") -> None:
        """The store has answered; `key` is that of an image that it gave."""
        self._heard, self._key = time.monotonic(), key or self._key

    def answers(self, since: float, get: Callable[[str], object]) -> bool:
        """Whether the store answers when it is asked for something that it has given before.

        One thread asks for all, and none where an answer, or a question in vain, is newer than `since`. `get` tells us
        of what it hears.
        """
        with self._asking:
            if self._heard >= since or self._vain >= since:
                return self._heard >= since
            began = time.monotonic()
            try:
                get(self._key)
            except PASSES:
                self._vain = began
                return False
            except DdptrainError:
                pass
            return True
