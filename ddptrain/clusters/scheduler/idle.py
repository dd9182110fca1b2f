"""Whether anyone has used a cluster lately, for processes beside a scheduler that is not ours."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from ddptrain.clusters.resolve import Target
from ddptrain.clusters.scheduler.process import LOOKER, is_used

if TYPE_CHECKING:
    from distributed import Scheduler

_LOOK_S = 5.0
_ASK_S = 5.0
_LOG = logging.getLogger(__name__)


class IdleWatch:
    """Counts the seconds without a run on the cluster; with `timeout_s` 0 they are never too many."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.pause_s = min(_LOOK_S, timeout_s / 4) if timeout_s else _LOOK_S
        self._target = target
        self._timeout_s = timeout_s
        self._since = time.monotonic()
        self._told = ""

    def is_over(self) -> bool:
        """Whether nobody has used the cluster for that long; to be asked every `pause_s` seconds."""
        if not self._timeout_s:
            return False
        asked_at = time.monotonic()  # a scheduler that is slow to answer has not been idle meanwhile
        if self._is_used():
            self._since = time.monotonic()
        return asked_at - self._since >= self._timeout_s

    def _is_used(self) -> bool:
        """A scheduler that does not answer is not used; of one that can't be asked nobody knows."""
        try:
            return asyncio.run(asyncio.wait_for(self._ask(), _ASK_S))
        except OSError as error:  # TimeoutError is one
            self._tell(f"the scheduler at {self._target.address} does not answer: {error!r}")
            return False
        except Exception as error:
            self._tell(f"the scheduler can't be asked whether a run is on it, so it counts as used: {error!r}")
            return True

    async def _ask(self) -> bool:
        from distributed import Client

        client = Client(
            self._target.address,
            security=self._target.security,
            timeout=_ASK_S,
            name=LOOKER,
            asynchronous=True,
            set_as_default=False,
        )
        try:
            await client
            return bool(await client.run_on_scheduler(_used))
        finally:
            await client.close()

    def _tell(self, text: str) -> None:
        if text != self._told:
            _LOG.warning(text)
        self._told = text


def _used(dask_scheduler: Scheduler) -> bool:
    return is_used(dask_scheduler)
