"""In shared mode the first rank opens the run, the others join it: word of that goes through the gang's store.

A key in the store is no collective: whoever waits for it has a deadline, and holds nobody up.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_OPEN, _NOT_OPEN = "open", "not open"


class Meeting:
    """Where the ranks of an attempt hear whether the run is open. Nothing of it raises."""

    def __init__(self, attempt: int, environ: Mapping[str, str] = os.environ) -> None:
        self._key = f"ddptrain/{attempt}/tracking/wandb"
        self._environ = environ

    def _store(self, timeout_s: float) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = self._environ["MASTER_ADDR"], int(self._environ["MASTER_PORT"])
        timeout = dt.timedelta(seconds=timeout_s)
        return TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)

    def tell(self, *, is_open: bool) -> str:
        """Say it to all; why that was not possible, or ""."""
        try:
            self._store(10.0).set(self._key, _OPEN if is_open else _NOT_OPEN)
        except (RuntimeError, KeyError, ValueError) as error:
            return str(error)
        return ""

    def wait(self, timeout_s: float) -> str:
        """Wait until the run is open; why it is not, or ""."""
        try:
            word = self._store(timeout_s).get(self._key).decode()
        except (RuntimeError, KeyError, ValueError):
            return f"rank 0 has not opened the W&B run within {timeout_s:g} s"
        return "" if word == _OPEN else "rank 0 has opened no W&B run online"
