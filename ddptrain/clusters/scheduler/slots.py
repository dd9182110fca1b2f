"""The slot table: a worker group gets all the slots that it requests, or none, and waits in a queue for them.

The run with the highest priority is first in the queue, among equal ones the one that has waited longest. Only the
first gets slots: free ones that are too few for it wait with it, so small runs never keep a large one waiting.

It is a scheduler plugin. So requests of two drivers are handled one after the other, and the slots of a driver
that was killed are free as soon as its connection to the scheduler ends. The plugin is added with the first run and
removed with the last: a cluster that ddptrain has not started is not changed permanently.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from distributed import Scheduler, SchedulerPlugin

from ddptrain import log
from ddptrain.errors import ClusterError
from ddptrain.protocol.rank_spec import GPU_RESOURCE, SLOT_RESOURCE, WORKER_METRIC, attached_plugin
from ddptrain.worker.rank_task import topic
from ddptrain.worker.tcp_timeouts import apply_tcp_timeout

PLUGIN_NAME = "ddptrain-slots"
USED_AT = "ddptrain_used_at"  # attribute of the scheduler: when a call counted as use (monotonic seconds)
_FORGET_WAITER_S = 30.0  # a waiting driver that does not repeat its request for that long leaves the queue
_LAST_MESSAGES_S = 1.0

_log = log.Log("ddptrain.scheduler")


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one rank: address and host of a worker, and the number of its slot; `gpu` says whether it has a GPU.

    `counted` means that it is also a Dask resource of the worker.
    """

    worker: str
    host: str
    index: int
    gpu: bool
    counted: bool


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a driver: `count` slots (None: all), with `gpus_only` only those with a GPU.

    `without` are addresses of workers to avoid. `lost_after_s` is how long the run survives a network cut
    (None: the limits of the cluster stay). A higher `priority` is served first.
    """

    client: str
    run_id: str
    count: int | None
    gpus_only: bool
    without: frozenset[str]
    lost_after_s: float | None
    priority: int = 0

    def suits(self, slot: Slot) -> bool:
        """Return whether the request accepts that slot."""
        return not self.avoids(slot) and (slot.gpu or not self.gpus_only)

    def avoids(self, slot: Slot) -> bool:
        """Return whether the request does not want a slot of that worker."""
        return slot.worker in self.without


@dataclass(slots=True)
class Grant:
    """The slots of a run, and the workers that have its plugin: also those whose slots it no longer has.

    since: when the run got its first slots, in seconds since 1970.
    """

    request: Request
    slots: list[Slot]
    workers: set[str]
    since: float


@dataclass(slots=True)
class Waiter:
    """A driver in the queue; times in monotonic seconds."""

    request: Request
    since: float
    heard_at: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there are no slots yet. `place` is the position in the queue: 1 is next, 0 is not in the queue.

    holders: the other runs that have slots: id, number of slots, and since when, in seconds since 1970.
    total, hosts: slots that suit the request. of_any_kind: the same with those that lack a GPU.
    """

    asked: int
    free: int
    total: int
    place: int
    holders: tuple[tuple[str, int, float], ...]
    hosts: Mapping[str, int]
    of_any_kind: int


class SlotTable(SchedulerPlugin):
    """Which run holds which slot, and which drivers wait."""

    name = PLUGIN_NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.grants: dict[str, Grant] = {}  # by run
        self.queue: dict[str, Waiter] = {}  # by run
        self.closed = False  # the cluster ends: no run gets slots
        self.offers: dict[str, tuple[int, int]] = {}  # foreign workers -> (slots, GPUs)
        self._removals: set[asyncio.Future[Any]] = set()

    @property
    def holders(self) -> dict[Slot, Request]:
        """The slots that are in use, and the requests of their runs."""
        return {slot: grant.request for grant in self.grants.values() for slot in grant.slots}

    def all(self) -> list[Slot]:
        """Return all slots of all running workers whose offer is known."""
        return [slot for address in self._running() for slot in self._slots_of(address)]

    def unknown(self) -> list[str]:
        """Return addresses of workers whose offer is not known yet."""
        return [
            address
            for address, state in self._running().items()
            if SLOT_RESOURCE not in state.resources and address not in self.offers
        ]

    def free(self, request: Request, besides: Collection[Slot] = ()) -> list[Slot]:
        """Free slots, ordered by host, the hosts with most free slots first: a group uses as few hosts as possible."""
        taken = self.holders.keys() - set(besides)
        slots = [slot for slot in self.all() if slot not in taken and request.suits(slot)]
        room = Counter(slot.host for slot in slots)
        return sorted(slots, key=lambda slot: (-room[slot.host], slot.host, slot.worker, slot.index))

    def reserve(self, request: Request, *, in_line: bool) -> list[Slot] | Refusal:
        """Return all requested slots, or a refusal; with `in_line` the driver is then in the queue.

        A run that holds slots requests others in their place. It does not queue again.
        """
        self._forget_the_silent()
        wanted = [slot for slot in self.all() if not request.avoids(slot)]
        everything = [slot for slot in wanted if request.suits(slot)]
        asked = request.count if request.count is not None else max(1, len(everything))
        grant = self.grants.get(request.run_id) or Grant(request, [], set(), time.time())
        free = self.free(request, besides=grant.slots)
        is_next = self.line(request)[0] == request.run_id or bool(grant.slots)
        if is_next and len(free) >= asked:
            self.queue.pop(request.run_id, None)
            # Also the request is replaced: a driver that resumes the run is another client.
            workers = grant.workers | {slot.worker for slot in free[:asked]}
            self.grants[request.run_id] = Grant(request, free[:asked], workers, grant.since)
            granted = [f"{slot.worker} {slot.index}" for slot in free[:asked]]
            _log.info("slots reserved", run=request.run_id, slots=granted)
            return free[:asked]
        place = 0
        if asked > len(everything):
            self.queue.pop(request.run_id, None)  # it would block requests that can succeed
        elif in_line:
            place = self._enqueue(request)
        _log.debug("slots refused", run=request.run_id, asked=asked, free=len(free), total=len(everything), place=place)
        hosts = Counter(slot.host for slot in everything)
        holders = tuple(
            (run_id, len(each.slots), each.since)
            for run_id, each in sorted(self.grants.items())
            if each.slots and run_id != request.run_id
        )
        return Refusal(asked, len(free), len(everything), place, holders, dict(hosts), len(wanted))

    def release(self, run_id: str, client: str = "") -> None:
        """Release the slots of a run, and its place in the queue, unless they are of another client than `client`."""
        self._drop(lambda request: request.run_id == run_id and client in ("", request.client))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Release the slots of a driver whose connection has ended."""
        self._drop(lambda request: request.client == client)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Forget the slots of a worker that has left."""
        self.offers.pop(worker, None)
        _log.info("worker left", worker=worker)
        for grant in self.grants.values():
            grant.slots = [slot for slot in grant.slots if slot.worker != worker]

    @property
    def lost_after_s(self) -> float | None:
        """The longest network cut in seconds that a run on the cluster wants to survive; None if no run sets it."""
        wanted = [grant.request.lost_after_s for grant in self.grants.values()]
        return max((limit_s for limit_s in wanted if limit_s is not None), default=None)

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

    def _enqueue(self, request: Request) -> int:
        now = time.monotonic()
        known = self.queue.get(request.run_id)
        self.queue[request.run_id] = Waiter(request, known.since if known else now, now)
        return self.line(request).index(request.run_id) + 1

    def line(self, request: Request | None = None) -> list[str]:
        """Return the runs in the order in which they get slots; with a `request` also its run, which may not wait."""
        waiters = list(self.queue.values())
        if request is not None and request.run_id not in self.queue:
            waiters.append(Waiter(request, time.monotonic(), 0.0))
        return [each.request.run_id for each in sorted(waiters, key=lambda each: (-each.request.priority, each.since))]

    def _forget_the_silent(self) -> None:
        limit = time.monotonic() - _FORGET_WAITER_S
        self.queue = {run_id: waiter for run_id, waiter in self.queue.items() if waiter.heard_at > limit}

    def _drop(self, leaves: Callable[[Request], bool]) -> None:
        for run_id in [run_id for run_id, grant in self.grants.items() if leaves(grant.request)]:
            _log.info("slots released", run=run_id)
            self._detach(run_id, self.grants.pop(run_id).workers)
        for run_id in [run_id for run_id, waiter in self.queue.items() if leaves(waiter.request)]:
            del self.queue[run_id]
            _forget_topic(self.scheduler, run_id)
        in_use = self.grants or self.queue or self.closed
        if not in_use and self.scheduler.plugins.get(PLUGIN_NAME) is self:
            self.scheduler.remove_plugin(PLUGIN_NAME)

    def _detach(self, run_id: str, workers: set[str]) -> None:
        """Remove the run's plugin from its workers, which ends its remaining ranks, and delete its topic."""
        present = [address for address in workers if address in self.scheduler.workers]
        if not present:
            _forget_topic(self.scheduler, run_id)
            return
        message = {"op": "plugin-remove", "name": attached_plugin(run_id)}
        removal = asyncio.ensure_future(self.scheduler.broadcast(msg=message, workers=present, on_error="ignore"))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        # The last messages of the ranks arrive over other connections, maybe after the answers to this call.
        forget = partial(_forget_unheard_topic, self.scheduler, run_id)
        removal.add_done_callback(lambda _: removal.get_loop().call_later(_LAST_MESSAGES_S, forget))


def _forget_topic(scheduler: Scheduler, run_id: str) -> None:
    """Delete the topic of a run: the scheduler would keep its last thousand messages for ever."""
    broker = getattr(scheduler, "_broker", None)
    if broker is not None:
        broker._topics.pop(topic(run_id), None)  # noqa: SLF001  # there is no public way


def _forget_unheard_topic(scheduler: Scheduler, run_id: str) -> None:
    """Delete the topic of a run, unless another driver has resumed the run meanwhile and listens."""
    broker = getattr(scheduler, "_broker", None)
    found = broker._topics.get(topic(run_id)) if broker is not None else None  # noqa: SLF001
    if found is None or scheduler.clients.keys().isdisjoint(found.subscribers):
        _forget_topic(scheduler, run_id)


def _table(scheduler: Scheduler) -> SlotTable:
    """Return the scheduler's slot table, which the first call creates."""
    if PLUGIN_NAME not in scheduler.plugins:
        scheduler.add_plugin(SlotTable(scheduler), name=PLUGIN_NAME)
    return cast(SlotTable, scheduler.plugins[PLUGIN_NAME])


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
    priority: int = 0,
) -> dict[str, Any]:
    """For run_on_scheduler: reserve slots for a run, or queue with `in_line`; `count` None requests all slots.

    Returns one of: {"unknown": addresses} of workers whose offer is not known (call `learn`, then call again),
    {"slots": [[worker, host, index, gpu, counted], ...]}, or {"refusal": fields of Refusal}. With `lost_after_s` the
    scheduler survives network cuts of that length from now on; the longest of all runs is returned with the slots.

    Raises ClusterError if a command is ending the cluster.
    """
    table = _table(dask_scheduler)
    if table.closed:
        raise ClusterError("a command is ending this cluster (ddptrain cluster down): start it again, or use another")
    if unknown := table.unknown():
        return {"unknown": unknown}
    request = Request(client, run_id, count, gpus_only, frozenset(without), lost_after_s, priority)
    answer = table.reserve(request, in_line=in_line)
    if isinstance(answer, Refusal):
        return {"refusal": {name: getattr(answer, name) for name in Refusal.__slots__}}
    found = [[slot.worker, slot.host, slot.index, slot.gpu, slot.counted] for slot in answer]
    if table.lost_after_s is None:
        return {"slots": found}
    apply_tcp_timeout(dask_scheduler, table.lost_after_s)
    return {"slots": found, "lost_after_s": table.lost_after_s}


def learn(offers: Mapping[str, tuple[int, int]], dask_scheduler: Scheduler) -> None:
    """For run_on_scheduler: set the (slots, GPUs) that foreign workers offer, by address."""
    _table(dask_scheduler).offers.update(offers)


def release(run_id: str, dask_scheduler: Scheduler, *, client: str = "") -> None:
    """For run_on_scheduler: release the slots of a run, and delete its topic.

    With `client` nothing happens if another client has meanwhile got slots for the run, or waits for them.
    """
    table = dask_scheduler.plugins.get(PLUGIN_NAME)
    if isinstance(table, SlotTable):
        table.release(run_id, client)
        if run_id in table.grants or run_id in table.queue:
            return
    _forget_topic(dask_scheduler, run_id)


def close(dask_scheduler: Scheduler) -> dict[str, Any]:
    """For run_on_scheduler: refuse all requests from now on, if no run uses the cluster; return the overview."""
    if not is_busy(dask_scheduler):
        _table(dask_scheduler).closed = True
    return overview(dask_scheduler)


def overview(dask_scheduler: Scheduler, *, counts: bool = False) -> dict[str, Any]:
    """For run_on_scheduler: all workers, runs with slots, and waiting runs, as in `ddptrain cluster status --json`.

    `warm` is None for foreign workers; they count 1 slot until a run has asked for their offer. `counts`: the call
    counts as use of the cluster.
    """
    found = dask_scheduler.plugins.get(PLUGIN_NAME)
    table = found if isinstance(found, SlotTable) else SlotTable(dask_scheduler)
    now = time.monotonic()
    if counts:
        setattr(dask_scheduler, USED_AT, now)
    held = Counter(slot.worker for slot in table.holders)
    workers = []
    for address, state in dask_scheduler.workers.items():
        slots = table._slots_of(address)  # noqa: SLF001  # within its own module
        metric = state.metrics.get(WORKER_METRIC)
        count = len(slots) if slots or SLOT_RESOURCE in state.resources else 1
        workers.append(
            {
                "host": state.host,
                "name": str(state.name),
                "address": address,
                "slots": count,
                "held": held[address],
                "free": max(0, count - held[address]),
                "gpus": sum(slot.gpu for slot in slots),
                "warm": metric.get("warm") if isinstance(metric, dict) else None,
            }
        )
    return {
        "workers": sorted(workers, key=lambda worker: (worker["host"], worker["address"])),
        "runs": [
            {
                "run_id": run_id,
                "slots": len(grant.slots),
                "hosts": sorted({slot.host for slot in grant.slots}),
                "since": round(grant.since, 1),
            }
            for run_id, grant in sorted(table.grants.items())
            if grant.slots
        ],
        "waiting": [
            {
                "run_id": run_id,
                "place": place,
                "asked": waiter.request.count,
                "priority": waiter.request.priority,
                "waited_s": round(now - waiter.since, 1),
            }
            for place, (run_id, waiter) in enumerate(((run_id, table.queue[run_id]) for run_id in table.line()), 1)
        ],
    }


def is_busy(dask_scheduler: Scheduler) -> bool:
    """Return whether a run is on the cluster, or waits for slots."""
    found = dask_scheduler.plugins.get(PLUGIN_NAME)
    return isinstance(found, SlotTable) and bool(found.grants or found.queue)
