"""Removes workers that send no heartbeat, by the monotonic clock.

Dask's own `worker-ttl` compares times of the wall clock: if that jumps forward, Dask removes every worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler


async def drop_the_silent(scheduler: Scheduler, limit_s: Callable[[], float]) -> None:
    """Remove workers that have sent no heartbeat for `limit_s` and for ten heartbeat intervals. Never returns.

    Time in which this process itself was stopped does not count: it has not read the heartbeats of that time yet.
    """
    from distributed.scheduler import heartbeat_interval

    heard: dict[str, tuple[float, float]] = {}  # address -> Dask's time of the last heartbeat, and when we saw it
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
