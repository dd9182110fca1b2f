"""Silent workers are dropped by a clock that nobody sets."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import distributed.scheduler
import pytest

from ddptrain.clusters.scheduler.worker_ttl import drop_the_silent

TTL_S = 0.4


class FakeScheduler:
    """Workers with the wall clock's time of their last heartbeat, as Dask notes it."""

    def __init__(self, *workers: str) -> None:
        self.workers = {address: SimpleNamespace(last_seen=1000.0) for address in workers}

    async def remove_worker(self, address: str, stimulus_id: str) -> None:
        del self.workers[address]


async def watched(scheduler: Any, beat: Any, times: int) -> None:
    """Watch while `beat(number)` is called every eighth of the time to live."""
    watch = asyncio.ensure_future(drop_the_silent(scheduler, lambda: TTL_S))
    for number in range(times):
        beat(number)
        await asyncio.sleep(TTL_S / 8)
    watch.cancel()


@pytest.fixture(autouse=True)
def few_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.scheduler, "heartbeat_interval", lambda _: 0.0)


def test_worker_without_heartbeats_is_dropped_and_the_others_stay() -> None:
    scheduler = FakeScheduler("silent", "alive")

    def beat(number: int) -> None:
        scheduler.workers["alive"].last_seen += 1.0

    asyncio.run(watched(scheduler, beat, 16))
    assert [*scheduler.workers] == ["alive"]


def test_jump_of_the_clock_drops_nobody() -> None:
    scheduler = FakeScheduler("one", "two")

    def beat(number: int) -> None:
        for state in scheduler.workers.values():
            state.last_seen += -3600.0 if number == 8 else 3600.0 if number == 4 else 0.01

    asyncio.run(watched(scheduler, beat, 16))
    assert [*scheduler.workers] == ["one", "two"]


def test_time_in_which_the_scheduler_itself_stood_still_does_not_count() -> None:
    scheduler = FakeScheduler("alive")

    def beat(number: int) -> None:
        if number == 8:
            time.sleep(2 * TTL_S)  # what workers send now is read when it is over
        else:
            scheduler.workers["alive"].last_seen += 1.0

    asyncio.run(watched(scheduler, beat, 12))
    assert [*scheduler.workers] == ["alive"]
