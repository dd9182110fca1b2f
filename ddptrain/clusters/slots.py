"""The scheduler's book of slots: a gang gets all the slots it asks for, or none.

A scheduler plugin, so that two drivers asking at once are answered one after the other, and so that the slots of a
driver that dies are free again the moment the scheduler sees its connection end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from distributed import Scheduler, SchedulerPlugin

from ddptrain.spec import GPU_RESOURCE, SLOT_RESOURCE

PLUGIN_NAME = "ddptrain-slots"


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one rank: a worker's address and host, and which of its slots; `gpu` says whether it has a device."""

    worker: str
    host: str
    index: int
    gpu: bool


class SlotBook(SchedulerPlugin):
    """Who holds which slot of which worker."""

    name = PLUGIN_NAME
    idempotent = True  # a second driver must find the first one's reservations, not replace them

    def __init__(self) -> None:
        self.holders: dict[Slot, tuple[str, str]] = {}  # slot -> (client id, run id)

    async def start(self, scheduler: Scheduler) -> None:
        """Called by Dask when the plugin is registered."""
        self.scheduler = scheduler

    def free(self) -> list[Slot]:
        """Free slots, hosts together, the emptiest hosts first so that a gang spreads over as few as possible."""
        slots = [slot for slot in self.all() if slot not in self.holders]
        room = {host: sum(slot.host == host for slot in slots) for host in {slot.host for slot in slots}}
        return sorted(slots, key=lambda slot: (-room[slot.host], slot.host, slot.worker, slot.index))

    def all(self) -> list[Slot]:
        """Every slot of every worker that is up."""
        found = []
        for address, state in self.scheduler.workers.items():
            if state.status.name != "running":
                continue
            gpus = int(state.resources.get(GPU_RESOURCE, 0))
            count = int(state.resources.get(SLOT_RESOURCE, 0))
            found += [Slot(address, state.host, index, index < gpus) for index in range(count)]
        return found

    def reserve(self, client: str, run_id: str, count: int) -> list[Slot] | None:
        """`count` slots for a client, or None: never a part of them."""
        free = self.free()
        if len(free) < count:
            return None
        chosen = free[:count]
        self.holders.update(dict.fromkeys(chosen, (client, run_id)))
        return chosen

    def release(self, run_id: str) -> None:
        """Give back what a run holds."""
        self.holders = {slot: holder for slot, holder in self.holders.items() if holder[1] != run_id}

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """The driver is gone: its slots are free."""
        self.holders = {slot: holder for slot, holder in self.holders.items() if holder[0] != client}

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """The worker is gone, and its slots with it."""
        self.holders = {slot: holder for slot, holder in self.holders.items() if slot.worker != worker}


def _book(scheduler: Scheduler) -> SlotBook:
    return cast(SlotBook, scheduler.plugins[PLUGIN_NAME])


def reserve(client: str, run_id: str, count: int | None, dask_scheduler: Scheduler) -> dict[str, Any]:
    """For run_on_scheduler: {"slots": [[worker, host, index, gpu], ...] or None, "asked", "free", "total", "holders"}.

    `count` None asks for every slot of the cluster.
    """
    book = _book(dask_scheduler)
    asked = count if count is not None else max(1, len(book.all()))
    slots = book.reserve(client, run_id, asked)
    return {
        "asked": asked,
        "slots": [[slot.worker, slot.host, slot.index, slot.gpu] for slot in slots] if slots is not None else None,
        "free": len(book.free()),
        "total": len(book.all()),
        "holders": sorted({run for _, run in book.holders.values()}),
    }


def release(run_id: str, dask_scheduler: Scheduler) -> None:
    """For run_on_scheduler: give back what a run holds."""
    _book(dask_scheduler).release(run_id)
