"""The deadline of a start: at its end this process gets SIGTERM, so that it saves and ends."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Self

from ddptrain.log import Log

_log = Log(__name__)


class Deadline:
    """A time limit in seconds for the `with` block; None is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.is_reached = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if self.seconds is not None:
            self._timer = threading.Timer(self.seconds, self._reach)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _reach(self) -> None:
        self.is_reached = True
        _log.info("deadline reached", seconds=self.seconds)
        os.kill(os.getpid(), signal.SIGTERM)
