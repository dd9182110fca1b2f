"""One attempt: the gang from its first rank's start to its last rank's end, watched by the driver's main thread."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain import events
from ddptrain.driver import cause
from ddptrain.driver.cause import Fault, Kind
from ddptrain.driver.gang import Gang, Place
from ddptrain.driver.inbox import (
    BroughtHome,
    Inbox,
    Message,
    NotBroughtHome,
    Notice,
    Signalled,
    TaskFailed,
    WorkerLost,
)
from ddptrain.driver.mirror import SpoolMirror
from ddptrain.driver.porter import Porter
from ddptrain.driver.telling import Telling
from ddptrain.results.errors import UnsafePath
from ddptrain.results.record import RankRecord
from ddptrain.spec import RankExit, RankSpec, describe_status
from ddptrain.worker.spool import rank_spool

_TICK_S = 0.2  # between two looks at what sends no message: a worker's process, the connection
_SETTLE_S = 0.15  # after the first fault: an earlier one of another rank may still be on its way
_CLEAN_UP_S = 2.0  # for a rank that has failed by itself to run its own clean-up, before it is stopped, too
_VICTIM_SETTLE_S = 1.5  # after a fault of which another must be the cause
_SCHEDULER_LOST_S = 3.0  # without a connection to the scheduler, before the run is given up
_SILENCE_S = 15.0  # without a word from a rank's worker, which speaks every 2 s: it is gone, or cut off
_STOPPED_S = 3.0  # between two looks of ours: this process was suspended itself, and has heard nobody
_STOP_MARGIN_S = 3.0  # beyond grace_s, for the word of a rank's end to arrive


@dataclass
class RankWatch:
    """What the driver knows of one rank."""

    spec: RankSpec
    place: Place
    mirror: SpoolMirror
    started: events.Started | None = None
    entered: bool = False
    finished: bool = False
    fault: Fault | None = None
    ended: RankExit | None = None
    given_up: bool = False
    submitted_at: float = 0.0  # monotonic seconds, as the next; 0 before
    heard_at: float = 0.0
    step: int | None = None  # the last that it has logged

    @property
    def over(self) -> bool:
        """Nothing more will come of this rank."""
        return self.ended is not None or self.given_up

    def record(self) -> RankRecord:
        """The rank's lines in run.json."""
        return RankRecord(
            rank=self.spec.rank,
            local_rank=self.spec.local_rank,
            node_rank=self.spec.node_rank,
            host=self.started.host if self.started else self.place.hostname,
            pid=self.started.pid if self.started else (self.ended.pid if self.ended else None),
            gpu=self.started.device if self.started and self.started.device != "cpu" else None,
            exit=self.ended.status if self.ended else None,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the attempt ended: by a fault, by a signal to the driver, or well (neither)."""

    ranks: Sequence[RankWatch]
    fault: Fault | None
    signum: int | None


class Attempt:
    """Starts the gang, watches it, and stops it at the first fault."""

    def __init__(
        self,
        gang: Gang,
        ranks: Sequence[tuple[RankSpec, Place, Path]],
        porter: Porter,
        telling: Telling,
        inbox: Inbox,
        worker_fault: Callable[[], str | None],
        start_timeout_s: float,
    ) -> None:
        self.start_timeout_s = start_timeout_s
        self.gang, self.porter, self.telling, self.inbox = gang, porter, telling, inbox
        self.worker_fault = worker_fault
        self.ranks = [self._watched(*rank) for rank in ranks]
        self.faults: list[Fault] = []
        self.signum: int | None = None
        self.settle_until: float | None = None
        self.stop_until: float | None = None
        self.spare_until: float | None = None
        self.connected_at = self.looked_at = time.monotonic()
        self.errands = 0

    def _watched(self, spec: RankSpec, place: Place, home_log: Path) -> RankWatch:
        spool = rank_spool(place.scratch, spec.run_id, spec.attempt, spec.rank)

        def fetch(path: Path, offset: int, size_bytes: int) -> bytes:
            return self.gang.fetch(place.slot.worker, path, offset, size_bytes)

        return RankWatch(spec, place, SpoolMirror(spool, home_log, shared=place.shared, fetch=fetch))

    @property
    def workers(self) -> set[str]:
        """Addresses of the gang's workers."""
        return {watch.place.slot.worker for watch in self.ranks}

    @property
    def stopping(self) -> bool:
        """Whether the gang has been told to end."""
        return self.stop_until is not None

    def run(self) -> Outcome:
        """Start rank 0, the others once its store is open, and watch until every rank is over."""
        self._submit(self.ranks[0])
        while not all(watch.over for watch in self.ranks):
            self._take_one()
            self._watch_cluster()
            self._watch_deadlines()
        self._drain()
        fault = cause.first_cause(self.faults) if self.faults else None
        return Outcome(self.ranks, fault, self.signum)

    def _take_one(self) -> None:
        deadlines = (self.settle_until, self.spare_until, self.stop_until)
        nearest = min((until - time.monotonic() for until in deadlines if until is not None), default=_TICK_S)
        try:
            message = self.inbox.get(timeout=max(0.0, min(_TICK_S, nearest)))
        except queue.Empty:
            return
        self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Notice(fields):
                self._on_notice(fields)
            case TaskFailed(rank, text):
                self._give_up(self.ranks[rank], Kind.INFRASTRUCTURE, text)
            case WorkerLost(address):
                self._on_worker_lost(address, self._why_lost(address))
            case Signalled(signum):
                self._on_signal(signum)
            case BroughtHome(rank, what, path):
                self.errands -= 1
                self.telling.brought_home(rank, what, path)
            case NotBroughtHome(rank, what, error):
                self.errands -= 1
                kind = Kind.REFUSED if isinstance(error, UnsafePath) else Kind.RESULTS
                self._add_fault(Fault(rank, kind, time.time_ns(), f"{what} could not be saved: {error}"))

    def _on_notice(self, fields: Mapping[str, object]) -> None:
        watch = self.ranks[int(str(fields["rank"]))]
        if fields.get("attempt") != watch.spec.attempt:
            return
        watch.heard_at = time.monotonic()
        if "store_port" in fields:
            self._start_others(int(str(fields["store_port"])))
        if "data" in fields:
            data = fields["data"]
            assert isinstance(data, bytes)
            stream, offset = str(fields["stream"]), int(str(fields["offset"]))
            self._read(watch, lambda: watch.mirror.receive(stream, offset, data))
        if isinstance(sizes := fields.get("sizes"), Mapping):
            self._advance(watch, int(sizes["log"]), int(sizes["events"]))
        if "exit" in fields:
            self._on_exit(watch, RankExit.from_json(str(fields["exit"])))
        self._take_events(watch)

    def _start_others(self, port: int) -> None:
        if self.stopping:
            for watch in self.ranks[1:]:
                watch.given_up = True
            return
        for watch in self.ranks[1:]:
            watch.spec = dataclasses.replace(watch.spec, master_port=port)
            self._submit(watch)

    def _submit(self, watch: RankWatch) -> None:
        watch.submitted_at = time.monotonic()
        self.gang.submit(watch.spec, watch.place.slot)

    def _advance(self, watch: RankWatch, log_size: int, events_size: int) -> None:
        self._read(watch, lambda: watch.mirror.advance(log_size, events_size))
        self.telling.display.log_grew()

    def _read(self, watch: RankWatch, from_spool: Callable[[], None]) -> None:
        try:
            from_spool()
        except Exception as error:
            # Of a worker that is lost a message tells, with the reason.
            if not watch.over and not self.stopping and self.gang.has(watch.place.slot.worker):
                self._give_up(watch, Kind.INFRASTRUCTURE, f"its output could not be read: {error}")

    def _take_events(self, watch: RankWatch) -> None:
        for event in watch.mirror.take_events():
            self._on_event(watch, event)

    def _on_event(self, watch: RankWatch, event: events.Event) -> None:
        rank = watch.spec.rank
        match event:
            case events.Started():
                watch.started = event
            case events.Failure():
                watch.fault = cause.from_failure(rank, event)
                self._add_fault(watch.fault)
            case events.Entered():
                watch.entered = True
                if all(other.entered for other in self.ranks):
                    self.telling.training(tuple(other.record() for other in self.ranks))
            case events.Finished():
                watch.finished = True
            case events.CheckpointSaved() | events.FileSaved():
                self._send_porter(watch, event)
            case events.Metrics():
                watch.step = event.step if event.step is not None else watch.step
        self.telling.rank_event(rank, event)

    def _send_porter(self, watch: RankWatch, event: events.CheckpointSaved | events.FileSaved) -> None:
        fetch = None if watch.place.shared else self._fetch_for(watch)
        staging = watch.mirror.spool.staging
        self.errands += 1
        if isinstance(event, events.CheckpointSaved):
            self.porter.bring_checkpoint(watch.spec.rank, event, staging, fetch)
        else:
            self.porter.bring_file(watch.spec.rank, event, staging, fetch)

    def _fetch_for(self, watch: RankWatch) -> Callable[[Path, int, int], bytes]:
        return lambda path, offset, size: self.gang.fetch(watch.place.slot.worker, path, offset, size)

    def _on_exit(self, watch: RankWatch, ended: RankExit) -> None:
        self._advance(watch, ended.log_size, ended.events_size)
        self._take_events(watch)
        watch.ended = ended
        if watch.finished:
            if ended.status != 0 and not self.stopping:
                self.telling.warn(
                    f"rank {ended.rank} finished its work, and ended with {describe_status(ended.status)} afterwards"
                )
        elif watch.fault is None and not self.stopping:
            watch.fault = cause.from_exit(ended)
            self._add_fault(watch.fault)
        self._tell_end(watch)

    def _why_lost(self, address: str) -> str:
        """Our own worker's exit status, which follows the end of its connection by a moment, or what Dask says."""
        for _ in range(10):
            if (fault := self.worker_fault()) is not None:
                return fault
            time.sleep(0.01)
        hosts = [watch.place.host for watch in self.ranks if watch.place.slot.worker == address]
        return (
            f"the Dask worker {address} of host {hosts[0]} was lost" if hosts else f"the Dask worker {address} was lost"
        )

    def _tell_end(self, watch: RankWatch) -> None:
        if watch.mirror.refused:
            self.telling.warn(f"rank {watch.spec.rank} wrote {watch.mirror.refused} lines that are no events; left out")
        stopped = self.stopping and watch.fault is None and not watch.finished
        self.telling.rank_ended(watch.record(), ok=watch.finished, stopped=stopped)

    def _on_worker_lost(self, address: str, text: str) -> None:
        self.gang.forget(address)
        for watch in self.ranks:
            if watch.place.slot.worker == address and not watch.over:
                self._give_up(watch, Kind.WORKER_LOST, text)

    def _give_up(self, watch: RankWatch, kind: Kind, text: str) -> None:
        """Nobody will report on this rank any more; what its files still hold is taken."""
        if watch.over:
            return
        if watch.place.shared:
            watch.mirror.catch_up()
            self._take_events(watch)
        watch.given_up = True
        if not self.stopping and watch.fault is None:
            watch.fault = Fault(watch.spec.rank, kind, time.time_ns(), text)
            self._add_fault(watch.fault)
        self._tell_end(watch)

    def _add_fault(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.telling.fault(fault)
        if self.stopping:
            return
        until = time.monotonic() + (_VICTIM_SETTLE_S if fault.victim else _SETTLE_S)
        self.settle_until = until if self.settle_until is None else min(self.settle_until, until)

    def _on_signal(self, signum: int) -> None:
        if self.signum is not None:
            self.telling.status("stopping at once")
            self._stop(0.0)
            return
        self.signum = signum
        self.telling.status("stopping the ranks (again to kill them at once)")
        self._stop(None)

    def _watch_cluster(self) -> None:
        """Give up ranks whose worker or scheduler is gone: nobody else tells of them."""
        now = time.monotonic()
        if (text := self.worker_fault()) is not None:
            for address in self.workers:
                self._on_worker_lost(address, text)
        if self.gang.connected:
            self.connected_at = now
        elif now - self.connected_at > _SCHEDULER_LOST_S:
            for address in self.workers:
                self._on_worker_lost(address, "the Dask scheduler is gone")
        self._watch_silence(now)

    def _watch_silence(self, now: float) -> None:
        """A cut cable sends no message: give up workers that have said nothing for too long, once all is read."""
        if now - self.looked_at > _STOPPED_S:
            for watch in self.ranks:
                watch.heard_at = watch.heard_at and now
        self.looked_at = now
        if not self.inbox.empty():
            return
        running = [watch for watch in self.ranks if watch.heard_at and not watch.over]
        silent = [watch for watch in running if now - watch.heard_at > _SILENCE_S]
        alone = len(silent) < len(running) or len({watch.place.slot.host for watch in running}) == 1
        for watch in silent:
            host = f"host {watch.place.host}" if alone else "the cluster"
            text = f"nothing was heard from {host} for {_SILENCE_S:.0f} s: is it down, or the network to it?"
            self._on_worker_lost(watch.place.slot.worker, text)
        self._watch_starts(now)

    def _watch_starts(self, now: float) -> None:
        """A worker of others may be busy with other work, and never come to the rank: a gang must not wait for it."""
        for watch in self.ranks:
            waits = watch.submitted_at and not watch.heard_at and not watch.over
            if waits and now - watch.submitted_at > self.start_timeout_s:
                worker, host = watch.place.slot.worker, watch.place.host
                text = (
                    f"the Dask worker {worker} of host {host} has not begun with it within {self.start_timeout_s:g} s"
                )
                self._give_up(watch, Kind.INFRASTRUCTURE, f"{text}: is it busy with other tasks?")

    def _watch_deadlines(self) -> None:
        """Go on with the stopping of the gang when its next moment has come."""
        now = time.monotonic()
        if self.settle_until is not None and now >= self.settle_until:
            self.settle_until = None
            if not self.stopping:
                self.telling.status("stopping the other ranks")
                self._stop(None, spare_failed=True)
                self.spare_until = now + _CLEAN_UP_S
        if self.spare_until is not None and now >= self.spare_until:
            self.spare_until = None
            self._stop(None)
        if self.stop_until is not None and now >= self.stop_until:
            for watch in self.ranks:
                self._give_up(watch, Kind.INFRASTRUCTURE, "it did not end")

    def _stop(self, grace_s: float | None, *, spare_failed: bool = False) -> None:
        """Stop every rank that is not over; ranks that were never started are over now."""
        alive = [watch for watch in self.ranks if not watch.over]
        if spare_failed:
            alive = [watch for watch in alive if watch.fault is None or watch.fault.victim]
        grace = self.ranks[0].spec.grace_s if grace_s is None else grace_s
        until = time.monotonic() + grace + _STOP_MARGIN_S
        self.stop_until = until if self.stop_until is None else min(self.stop_until, until)
        for watch in alive:
            if watch.spec.rank not in self.gang.futures:
                watch.given_up = True
        self.gang.stop([watch.spec for watch in alive], grace_s)

    def _drain(self) -> None:
        """Wait for the porter's last errands, and hear of them."""
        deadline = time.monotonic() + 600.0
        while self.errands > 0 and time.monotonic() < deadline:
            self._take_one()
