"""Which workers of a scheduler of ours have fallen silent, by a clock that nobody sets.

Dask's own `worker-ttl` compares times of the wall clock: where that jumps forward, it drops every worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler


async def drop_the_silent(scheduler: Scheduler, limit_s: Callable[[], float]) -> None:
    """Remove workers that have sent no heartbeat for `limit_s`, or for ten of their own intervals. Never returns.

    Time in which this process itself stood still does not count: what it was sent then, it has not read yet.
    """
    from distributed.scheduler import heartbeat_interval

    heard: dict[str, tuple[float, float]] = {}  # address -> what Dask noted of its last heartbeat, and when we saw that
    now, looked = 0.0, time.monotonic()
    while True:
        ttl_s = limit_s()
        await asyncio.sleep(ttl_s / 8)
        now += min(time.monotonic() - looked, ttl_s / 4)
        looked = time.monotonic()
        longest_s = max(ttl_s, 10 * heartbeat_interval(len(scheduler.workers)))
        for address, state in [*scheduler.workers.items()]:
            noted, since = heard.get(address, (None, now))
            if noted != state.last_seen:
                heard[address] = (state.last_seen, now)
            elif now - since > longest_s:
                await scheduler.remove_worker(address, stimulus_id=f"ddptrain-silent-{now}")
        heard = {address: seen for address, seen in heard.items() if address in scheduler.workers}
