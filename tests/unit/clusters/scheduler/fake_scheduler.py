"""A scheduler without Dask for tests of the slot table."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from ddptrain.clusters.scheduler import slots
from ddptrain.clusters.scheduler.slots import SlotTable


class FakeScheduler:
    """Workers by name: how many slots each has (None: a worker of others); its host is the name's first letter."""

    def __init__(self, loop: asyncio.AbstractEventLoop, **workers: int | None) -> None:
        self.loop = loop  # in which orders are sent to workers
        self.plugins: dict[str, Any] = {}
        self.orders: list[tuple[str, list[str]]] = []
        self.workers = {f"tcp://{name}": worker(name, count) for name, count in workers.items()}

    def add_plugin(self, plugin: Any, name: str) -> None:
        self.plugins[name] = plugin

    def remove_plugin(self, name: str) -> None:
        del self.plugins[name]

    def broadcast(self, msg: dict[str, Any], workers: list[str], on_error: str) -> asyncio.Future[None]:
        self.orders.append((msg["name"], sorted(workers)))
        answered: asyncio.Future[None] = self.loop.create_future()
        answered.set_result(None)
        return answered

    @property
    def table(self) -> SlotTable:
        return cast(SlotTable, self.plugins[slots.PLUGIN_NAME])


def worker(name: str, count: int | None) -> Any:
    resources = {} if count is None else {"slot": float(count)}
    return SimpleNamespace(
        host=name[0],
        name=name,
        status=SimpleNamespace(name="running"),
        resources=resources,
        metrics={} if count is None else {"ddptrain": {"warm": True}},
        last_seen=0.0,
    )


def ask(there: Any, run: str, count: int | None = 1, **options: Any) -> Any:
    return slots.reserve(f"client-{run}", run, count, there, **options)
