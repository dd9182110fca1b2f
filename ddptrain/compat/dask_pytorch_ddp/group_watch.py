"""Watches a worker group from the client: stops it after a failure, fails lost ranks, and frees the slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed import Client, Future, Scheduler

from ddptrain.clusters.scheduler import slots
from ddptrain.worker import driver_calls

GRACE_S = 10.0  # from SIGTERM to SIGKILL
_POLL_S = 0.05
_WORKERS_POLL_S = 1.0
_VICTIMS_S = 1.0  # after a failure, time for the other ranks to fail with their own errors


def start(client: Client, run_id: str, places: Mapping[str, str]) -> None:
    """Watch the worker group until it has ended; `places` maps the keys of the ranks to workers."""
    loop: Any = client.loop
    loop.add_callback(_Watch(client, run_id, dict(places)).run)


class _Watch:
    """Watches one worker group. It has keys, not futures: if the user deletes all futures, Dask ends the ranks."""

    def __init__(self, client: Client, run_id: str, places: dict[str, str]) -> None:
        self.client, self.run_id, self.places = client, run_id, places
        self.failed_at: float | None = None
        self.stopped = False

    async def run(self) -> None:
        """Watch until the end; never raises."""
        with suppress(Exception):  # it runs in the user's event loop, which must not get errors
            await self._watch()
        with suppress(Exception):  # the scheduler may have ended
            await self.client.run_on_scheduler(slots.release, self.run_id)

    async def _watch(self) -> None:
        checked_at = time.monotonic()
        while (pending := self._pending_keys()) and self.client.status == "running":
            if self.failed_at is not None and not self.stopped and time.monotonic() - self.failed_at > _VICTIMS_S:
                self.stopped = True
                await self._stop(pending)
            if time.monotonic() - checked_at > _WORKERS_POLL_S:
                await self._give_up_lost(pending)
                checked_at = time.monotonic()
            await asyncio.sleep(_POLL_S)

    def _pending_keys(self) -> list[str]:
        """Return the keys of ranks that have not ended; set failed_at after the first failure."""
        states = {key: self.client.futures.get(key) for key in self.places}
        if self.failed_at is None and any(state is None or state.status in _BAD for state in states.values()):
            self.failed_at = time.monotonic()
        return [key for key, state in states.items() if state is not None and state.status == "pending"]

    async def _stop(self, keys: Sequence[str]) -> None:
        workers = sorted({self.places[key] for key in keys})
        await self.client.run(
            driver_calls.stop_ranks,
            self.run_id,
            list(keys),
            GRACE_S,
            workers=workers,
            on_error="ignore",
            asynchronous=True,
        )

    async def _give_up_lost(self, keys: Sequence[str]) -> None:
        """Cancel the ranks of lost workers, for which Dask would wait forever."""
        workers = sorted({self.places[key] for key in keys})
        gone = await self.client.run_on_scheduler(_absent, workers)
        for key in keys:
            if self.places[key] in gone:
                reason = f"the worker {self.places[key]} of rank {key.rpartition('/')[2]} was lost"
                future: Future[Any] = Future(key, self.client)
                await self.client.cancel([future], asynchronous=True, force=True, reason="lost", msg=reason)


_BAD = ("error", "cancelled", "lost")


def _absent(workers: Sequence[str], dask_scheduler: Scheduler) -> list[str]:
    """Return the workers that have left the cluster; for run_on_scheduler."""
    return [worker for worker in workers if worker not in dask_scheduler.workers]
