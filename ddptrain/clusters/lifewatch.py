"""Which workers of a scheduler of ours have fallen silent, by a clock that nobody sets.

Dask's own `worker-ttl` compares times of the wall clock: where that jumps forward, it drops every worker.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler


async def drop_the_silent(scheduler: Scheduler, ttl_s: float) -> None:
    """Remove workers that have sent no heartbeat for `ttl_s`, or for ten of their own intervals. Never returns.

    Time in which this process itself stood still does not count: what it was sent then, it has not read yet.
    """
    from distributed.scheduler import heartbeat_interval

    heard: dict[str, tuple[float, float]] = {}  # address -> what Dask noted of its last heartbeat, and when we saw that
    now, looked = 0.0, time.monotonic()
    while True:
        await asyncio.sleep(ttl_s / 8)
        now += min(time.monotonic() - looked, ttl_s / 4)
        looked = time.monotonic()
        limit_s = max(ttl_s, 10 * heartbeat_interval(len(scheduler.workers)))
        for address, state in [*scheduler.workers.items()]:
            noted, since = heard.get(address, (None, now))
            if noted != state.last_seen:
                heard[address] = (state.last_seen, now)
            elif now - since > limit_s:
                await scheduler.remove_worker(address, stimulus_id=f"ddptrain-silent-{now}")
        heard = {address: seen for address, seen in heard.items() if address in scheduler.workers}
