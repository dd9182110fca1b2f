"""Measures how long a cluster has been idle, for processes that watch a scheduler from outside."""

from __future__ import annotations

import asyncio
import logging
import time

from ddptrain.clusters.resolve import Target
from ddptrain.clusters.scheduler.scheduler_process import is_used
from ddptrain.clusters.status import ask_scheduler

_LOOK_S = 5.0
_ASK_S = 5.0
_SILENT_S = 3600.0  # a scheduler that does not answer for that long has failed, and its machines may cost money
_LOG = logging.getLogger(__name__)


class IdleWatch:
    """Measures the time without a run on the cluster. With `timeout_s` 0 the time is never over.

    Time in which the scheduler does not answer is not idle: the network may be cut while a run is on the cluster.
    """

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.pause_s = min(_LOOK_S, timeout_s / 4) if timeout_s else _LOOK_S
        self._target = target
        self._timeout_s = timeout_s
        self._since = self._answered_at = time.monotonic()
        self._last_message = ""

    def is_over(self) -> bool:
        """Return whether the cluster has been idle for `timeout_s`, or silent for an hour if that is longer.

        Call it every `pause_s` seconds.
        """
        if not self._timeout_s:
            return False
        asked_at = time.monotonic()  # the time in which a slow scheduler answers does not count as idle
        used = self._is_used()
        if used is None:
            self._since = time.monotonic()
            return asked_at - self._answered_at >= max(self._timeout_s, _SILENT_S)
        self._answered_at = time.monotonic()
        if used:
            self._since = self._answered_at
        return asked_at - self._since >= self._timeout_s

    def _is_used(self) -> bool | None:
        """Return whether a run uses the cluster. None if the scheduler does not answer, True on any other error."""
        try:
            return asyncio.run(asyncio.wait_for(self._ask(), _ASK_S))
        except OSError as error:  # TimeoutError is one
            self._tell(f"the scheduler at {self._target.address} does not answer: {error!r}")
            return None
        except Exception as error:  # of any kind, from the remote call: the cluster must not be ended by mistake
            self._tell(f"the scheduler can't be asked whether a run is on it, so it is treated as used: {error!r}")
            return True

    async def _ask(self) -> bool:
        return bool(await ask_scheduler(self._target, is_used, _ASK_S))

    def _tell(self, text: str) -> None:
        if text != self._last_message:
            _LOG.warning(text)
        self._last_message = text
