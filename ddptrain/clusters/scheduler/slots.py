"""The scheduler's book of slots: a gang gets all the slots it asks for, or none, and waits in line for them.

A scheduler plugin, so that two drivers asking at once are answered one after the other, and so that the slots of a
driver that dies are free again the moment the scheduler sees its connection end. It comes with the first run and goes
with the last: a cluster of others is left as it was found.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from distributed import Scheduler, SchedulerPlugin

from ddptrain import log
from ddptrain.protocol.rank_spec import GPU_RESOURCE, SLOT_RESOURCE, WORKER_METRIC, attached_plugin
from ddptrain.worker.rank_task import topic
from ddptrain.worker.tcp_timeouts import follow

PLUGIN_NAME = "ddptrain-slots"
_FORGET_WAITER_S = 30.0  # without a word from a driver that waits: it must not hold up the line
_LAST_WORDS_S = 1.0

_log = log.Log("ddptrain.clusters.scheduler")


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one rank: a worker's address and host, and which of its slots; `gpu` says whether it has a device.

    `counted` says that Dask counts it as well, as a resource of the worker.
    """

    worker: str
    host: str
    index: int
    gpu: bool
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """What a driver asks for: `count` slots (None: all there are), those with a device only if `gpus_only`.

    `without` are workers that it does not want; `lost_after_s` is for how long it survives a cut network (None: it
    leaves the cluster's own limits alone).
    """

    client: str
    run_id: str
    count: int | None
    gpus_only: bool = False
    without: frozenset[str] = frozenset()
    lost_after_s: float | None = None

    def suits(self, slot: Slot) -> bool:
        """Whether it would take that slot."""
        return slot.worker not in self.without and (slot.gpu or not self.gpus_only)


@dataclass(slots=True)
class Waiter:
    """A driver in the line; monotonic seconds."""

    request: Request
    since: float
    heard_at: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there are no slots yet; `place` is 1 for the next in line, 0 for who does not stand in it."""

    asked: int
    free: int
    total: int
    place: int
    holders: tuple[str, ...]
    hosts: Mapping[str, int] = field(default_factory=dict)


class SlotBook(SchedulerPlugin):
    """Who holds which slot of which worker, and who waits."""

    name = PLUGIN_NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.holders: dict[Slot, Request] = {}
        self.used: dict[str, tuple[Request, set[str]]] = {}  # run -> the workers on which it has left something
        self.line: list[Waiter] = []
        self.offers: dict[str, tuple[int, int]] = {}  # workers of others -> slots, GPUs
        self._errands: set[asyncio.Future[Any]] = set()

    def all(self) -> list[Slot]:
        """Every slot of every worker that is up and known."""
        return [slot for address in self._running() for slot in self._slots_of(address)]

    def unknown(self) -> list[str]:
        """Workers of which nobody has told yet what they offer."""
        return [
            address
            for address, state in self._running().items()
            if SLOT_RESOURCE not in state.resources and address not in self.offers
        ]

    def free(self, request: Request, besides: Collection[Slot] = ()) -> list[Slot]:
        """Free slots, hosts together, the emptiest hosts first so that a gang spreads over as few as possible."""
        taken = self.holders.keys() - set(besides)
        slots = [slot for address in self._running() for slot in self._free_of(address, taken) if request.suits(slot)]
        room = Counter(slot.host for slot in slots)
        return sorted(slots, key=lambda slot: (-room[slot.host], slot.host, slot.worker, slot.index))

    def _free_of(self, address: str, taken: Collection[Slot]) -> list[Slot]:
        """A worker's free slots. One that was made smaller under a run has fewer than its indices tell."""
        slots = self._slots_of(address)
        left = len(slots) - sum(slot.worker == address for slot in taken)
        return [slot for slot in slots if slot not in taken][: max(0, left)]

    def reserve(self, request: Request, *, in_line: bool) -> list[Slot] | Refusal:
        """All the slots that are asked for, or a refusal; who asks for it then stands `in_line`.

        A run that holds slots asks for others in their place: it passes those who wait, for it has waited already.
        """
        self._forget_the_silent()
        everything = [slot for slot in self.all() if request.suits(slot)]
        asked = request.count if request.count is not None else max(1, len(everything))
        mine = {slot for slot, holder in self.holders.items() if holder.run_id == request.run_id}
        free = self.free(request, besides=mine)
        runs = [waiter.request.run_id for waiter in self.line]
        is_next = not runs or runs[0] == request.run_id or bool(mine)
        if is_next and len(free) >= asked:
            self._leave_line(request.run_id)
            self._grant(request, free[:asked], mine)
            _log.info(
                "slots reserved", run=request.run_id, slots=[f"{slot.worker} {slot.index}" for slot in free[:asked]]
            )
            return free[:asked]
        place = 0
        if asked > len(everything):
            self._leave_line(request.run_id)  # it would hold up those for whom there is room
        elif in_line:
            place = self._stand_in_line(request)
        _log.debug("slots refused", run=request.run_id, asked=asked, free=len(free), total=len(everything), place=place)
        hosts = Counter(slot.host for slot in everything)
        holders = sorted({holder.run_id for holder in self.holders.values()})
        return Refusal(asked, len(free), len(everything), place, tuple(holders), dict(hosts))

    def release(self, run_id: str) -> None:
        """Give back what a run holds, and its place in the line."""
        self._drop(lambda request: request.run_id == run_id)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """The driver is gone: its slots are free."""
        self._drop(lambda request: request.client == client)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """The worker is gone, and its slots with it."""
        self.offers.pop(worker, None)
        _log.info("worker left", worker=worker)
        self.holders = {slot: holder for slot, holder in self.holders.items() if slot.worker != worker}

    @property
    def lost_after_s(self) -> float | None:
        """The longest cut that a run on the cluster wants to survive; None where no run says so."""
        wanted = [request.lost_after_s for request, _ in self.used.values() if request.lost_after_s is not None]
        return max(wanted, default=None)

    def _grant(self, request: Request, slots: Sequence[Slot], before: Collection[Slot]) -> None:
        for slot in before:
            del self.holders[slot]
        self.holders.update(dict.fromkeys(slots, request))
        _, workers = self.used.setdefault(request.run_id, (request, set()))
        workers.update(slot.worker for slot in slots)

    def _running(self) -> dict[str, Any]:
        workers = self.scheduler.workers.items()
        return {address: state for address, state in workers if state.status.name == "running"}

    def _slots_of(self, address: str) -> list[Slot]:
        state = self.scheduler.workers[address]
        counted = SLOT_RESOURCE in state.resources
        if counted:
            count, gpus = (int(state.resources.get(name, 0)) for name in (SLOT_RESOURCE, GPU_RESOURCE))
        else:
            count, gpus = self.offers.get(address, (0, 0))
        return [Slot(address, state.host, index, index < gpus, counted) for index in range(count)]

    def _stand_in_line(self, request: Request) -> int:
        now = time.monotonic()
        for place, waiter in enumerate(self.line, 1):
            if waiter.request.run_id == request.run_id:
                waiter.heard_at = now
                return place
        self.line.append(Waiter(request, now, now))
        return len(self.line)

    def _leave_line(self, run_id: str) -> None:
        self.line = [waiter for waiter in self.line if waiter.request.run_id != run_id]

    def _forget_the_silent(self) -> None:
        limit = time.monotonic() - _FORGET_WAITER_S
        self.line = [waiter for waiter in self.line if waiter.heard_at > limit]

    def _drop(self, leaves: Any) -> None:
        for run_id in [run_id for run_id, (request, _) in self.used.items() if leaves(request)]:
            _log.info("slots released", run=run_id)
            self._detach(run_id, self.used.pop(run_id)[1])
        for waiter in self.line:
            if leaves(waiter.request):
                _forget_topic(self.scheduler, waiter.request.run_id)
        self.holders = {slot: holder for slot, holder in self.holders.items() if not leaves(holder)}
        self.line = [waiter for waiter in self.line if not leaves(waiter.request)]
        if not self.used and not self.line and self.scheduler.plugins.get(PLUGIN_NAME) is self:
            self.scheduler.remove_plugin(PLUGIN_NAME)

    def _detach(self, run_id: str, workers: set[str]) -> None:
        """Take away what the run has put on its workers; that ends what is left of it there. Its topic goes, too."""
        there = [address for address in workers if address in self.scheduler.workers]
        if not there:
            _forget_topic(self.scheduler, run_id)
            return
        order = {"op": "plugin-remove", "name": attached_plugin(run_id)}
        errand = asyncio.ensure_future(self.scheduler.broadcast(msg=order, workers=there, on_error="ignore"))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)
        # Last words of the ranks come over other connections than the answers to this order.
        forget = partial(_forget_unheard_topic, self.scheduler, run_id)
        errand.add_done_callback(lambda _: errand.get_loop().call_later(_LAST_WORDS_S, forget))


def _forget_topic(scheduler: Scheduler, run_id: str) -> None:
    """The scheduler would keep the last thousand messages of a run for ever."""
    broker = getattr(scheduler, "_broker", None)
    if broker is not None:
        for name in (topic(run_id), log.topic(run_id)):
            broker._topics.pop(name, None)  # noqa: SLF001  # there is no public way


def _forget_unheard_topic(scheduler: Scheduler, run_id: str) -> None:
    """The same some time later, unless another driver has taken the run up in between, and listens."""
    broker = getattr(scheduler, "_broker", None)
    found = broker._topics.get(topic(run_id)) if broker is not None else None  # noqa: SLF001
    if found is None or scheduler.clients.keys().isdisjoint(found.subscribers):
        _forget_topic(scheduler, run_id)


def _book(scheduler: Scheduler) -> SlotBook:
    """The scheduler's book; the first who asks brings it along."""
    if PLUGIN_NAME not in scheduler.plugins:
        scheduler.add_plugin(SlotBook(scheduler), name=PLUGIN_NAME)
    return cast(SlotBook, scheduler.plugins[PLUGIN_NAME])


def reserve(
    client: str,
    run_id: str,
    count: int | None,
    dask_scheduler: Scheduler,
    *,
    gpus_only: bool = False,
    in_line: bool = False,
    without: Sequence[str] = (),
    lost_after_s: float | None = None,
) -> dict[str, Any]:
    """For run_on_scheduler: slots for a run, or a place `in_line`; `count` None asks for every slot of the cluster.

    Returns {"unknown": addresses} where workers have not told what they offer (tell it with `learn`, ask again),
    {"slots": [[worker, host, index, gpu, counted], ...]}, or a Refusal's fields under "refusal". With `lost_after_s`
    the scheduler survives cuts of that length from now on; the longest of all runs is returned along with the slots.
    """
    book = _book(dask_scheduler)
    if unknown := book.unknown():
        return {"unknown": unknown}
    answer = book.reserve(Request(client, run_id, count, gpus_only, frozenset(without), lost_after_s), in_line=in_line)
    if isinstance(answer, Refusal):
        return {"refusal": {name: getattr(answer, name) for name in Refusal.__slots__}}
    found = [[slot.worker, slot.host, slot.index, slot.gpu, slot.counted] for slot in answer]
    if book.lost_after_s is None:
        return {"slots": found}
    follow(dask_scheduler, book.lost_after_s)
    return {"slots": found, "lost_after_s": book.lost_after_s}


def learn(offers: Mapping[str, tuple[int, int]], dask_scheduler: Scheduler) -> None:
    """For run_on_scheduler: how many slots and GPUs workers of others offer, by address."""
    _book(dask_scheduler).offers.update({worker: (int(slots), int(gpus)) for worker, (slots, gpus) in offers.items()})


def release(run_id: str, dask_scheduler: Scheduler) -> None:
    """For run_on_scheduler: give back what a run holds, and forget what it has said."""
    if PLUGIN_NAME in dask_scheduler.plugins:
        _book(dask_scheduler).release(run_id)
    _forget_topic(dask_scheduler, run_id)


def overview(dask_scheduler: Scheduler) -> dict[str, Any]:
    """For run_on_scheduler: who is there, who holds what, and who waits.

    {"workers": [{"address", "name", "host", "slots", "gpus", "held", "last_seen_s", "warm"}],
     "runs": [{"run_id", "slots", "hosts"}], "waiting": [{"run_id", "asked", "waited_s"}]}; `warm` is None for workers
    that are not ours, their slots 1 until a run has asked them.
    """
    found = dask_scheduler.plugins.get(PLUGIN_NAME)
    book = cast(SlotBook, found) if found is not None else SlotBook(dask_scheduler)
    held = Counter(slot.worker for slot in book.holders)
    workers = []
    for address, state in dask_scheduler.workers.items():
        slots = book._slots_of(address)  # noqa: SLF001  # the book's own module
        metric = state.metrics.get(WORKER_METRIC)
        workers.append(
            {
                "address": address,
                "name": str(state.name),
                "host": state.host,
                "slots": len(slots) if slots or SLOT_RESOURCE in state.resources else 1,
                "gpus": sum(slot.gpu for slot in slots),
                "held": held[address],
                "last_seen_s": round(max(0.0, time.time() - state.last_seen), 3),
                "warm": metric.get("warm") if isinstance(metric, dict) else None,
            }
        )
    by_run: dict[str, list[Slot]] = {}
    for slot, holder in book.holders.items():
        by_run.setdefault(holder.run_id, []).append(slot)
    now = time.monotonic()
    return {
        "workers": sorted(workers, key=lambda worker: (worker["host"], worker["address"])),
        "runs": [
            {"run_id": run_id, "slots": len(slots), "hosts": sorted({slot.host for slot in slots})}
            for run_id, slots in sorted(by_run.items())
        ],
        "waiting": [
            {"run_id": waiter.request.run_id, "asked": waiter.request.count, "waited_s": round(now - waiter.since, 1)}
            for waiter in book.line
        ],
    }


def is_busy(dask_scheduler: Scheduler) -> bool:
    """Whether a run is on the cluster, or waits for slots."""
    found = dask_scheduler.plugins.get(PLUGIN_NAME)
    return found is not None and bool(cast(SlotBook, found).used or cast(SlotBook, found).line)
