"""One attempt: the gang from its first rank's start to its last rank's end, watched by the driver's main thread."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure import grace as failure_grace
from ddptrain.driver.failure.fault import Fault, Kind
from ddptrain.driver.failure.outcome import was_sent
from ddptrain.driver.failure.stack_collector import Inquiry
from ddptrain.driver.failure.watchdog import Watchdog
from ddptrain.driver.failure.worker_heartbeat import Presence
from ddptrain.driver.messages import (
    BroughtHome,
    Delayed,
    Inbox,
    Message,
    NotBroughtHome,
    Notice,
    ResultsLost,
    Signalled,
    TaskFailed,
    WorkerLost,
)
from ddptrain.driver.rank_state import Outcome, RankWatch
from ddptrain.driver.recorder import Telling
from ddptrain.driver.transfer.artifacts import Porter
from ddptrain.driver.transfer.log_mirror import SpoolMirror
from ddptrain.driver.worker_group import Gang, Place
from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_FOLDER, RankExit, RankSpec, describe_status
from ddptrain.results.errors import UnsafePath
from ddptrain.worker.spool import rank_spool

_TICK_S = 0.2  # between two looks at what sends no message: a worker's process, the connection
_PREEMPT = "preempt"  # an order of rank/orders.py


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
        watchdog: Watchdog,
        start_timeout_s: float,
        lost_after_s: float,
    ) -> None:
        self.gang, self.porter, self.telling, self.inbox = gang, porter, telling, inbox
        self.worker_fault = worker_fault
        self.watchdog = watchdog
        self.ranks = [self._watched(*rank) for rank in ranks]
        self.inquiry = Inquiry(self.ranks, watchdog, gang.tell)
        self.faults: list[Fault] = []
        self.stacks: list[tuple[RankWatch, events.FileSaved]] = []
        self.signum: int | None = None
        self.notice: str | None = None
        self.leaving = False
        self.loss: DdptrainError | None = None
        self.preempt_until: float | None = None
        self.settle_until: float | None = None
        self.stop_until: float | None = None
        self.spare_until: float | None = None
        self.errands = 0
        limits = (start_timeout_s, lost_after_s, watchdog.suspended)
        self.presence = Presence(self.ranks, worker_fault, lambda: gang.connected, *limits)

    def _watched(self, spec: RankSpec, place: Place, home_log: Path) -> RankWatch:
        spool = rank_spool(place.scratch, spec.run_id, spec.attempt, spec.rank)
        fetch = partial(self.gang.fetch, place.slot.worker)
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
            self._watch_presence()
            self._watch_progress()
            self._watch_deadlines()
        self._drain()
        finished = [watch.spec.rank for watch in self.ranks if watch.finished]
        fault = self.inquiry.explained(failure_fault.first_cause(self.faults, finished)) if self.faults else None
        return Outcome(self.ranks, fault, self.signum, self.notice, self.loss, self.leaving)

    def _take_one(self) -> None:
        deadlines = (self.settle_until, self.spare_until, self.preempt_until, self.stop_until)
        nearest = min((until - time.monotonic() for until in deadlines if until is not None), default=_TICK_S)
        shortest_s = _TICK_S / 10 if self.inquiry.under_way else 0.0  # what has settled waits for the answers then
        try:
            message = self.inbox.get(timeout=max(shortest_s, min(_TICK_S, nearest)))
        except queue.Empty:
            return
        self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Notice(fields):
                self._on_notice(fields)
            case TaskFailed(attempt, rank, text):
                if attempt == self.ranks[rank].spec.attempt:
                    self._give_up(self.ranks[rank], Kind.INFRASTRUCTURE, text)
            case WorkerLost(address):
                self._on_worker_lost(address, self._why_lost(address))
            case Signalled(signum):
                self._on_signal(signum)
            case Delayed(rank, what, error, failures):
                self.telling.warn(f"{what} could not be saved (failure {failures} in a row), trying again: {error}")
            case ResultsLost(error):
                self.loss = error
                self._stop(None)
            case BroughtHome() | NotBroughtHome():
                self.errands -= 1
                self._on_errand(message)

    def _on_errand(self, message: BroughtHome | NotBroughtHome) -> None:
        match message:
            case BroughtHome(rank, what, path):
                self.telling.brought_home(rank, what, path)
            case NotBroughtHome(rank, what, error, vital=True):
                kind = Kind.REFUSED if isinstance(error, UnsafePath) else Kind.RESULTS
                self._add_fault(Fault(rank, kind, time.time_ns(), f"{what} could not be saved: {error}"))
            case NotBroughtHome(rank, what, error):
                self.telling.warn(f"{what} of rank {rank} could not be saved: {error}")

    def _on_notice(self, fields: Mapping[str, object]) -> None:
        watch = self.ranks[int(str(fields["rank"]))]
        if fields.get("attempt") != watch.spec.attempt:
            return
        watch.heard_at = time.monotonic()
        self.watchdog.notice(watch.spec.rank)
        if "cpu_s" in fields:
            self.watchdog.cpu(watch.spec.rank, float(str(fields["cpu_s"])))
        if "gpu_percent" in fields:
            self.watchdog.gpu(watch.spec.rank, float(str(fields["gpu_percent"])))
        if "leaving" in fields:
            self.leaving = True
            self.gang.avoid(watch.place.slot.worker)
            self._preempt(f"the worker on host {watch.place.host} was sent SIGTERM")
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
            watch.spec = watch.spec.with_port(port)
            self._submit(watch)

    def _submit(self, watch: RankWatch) -> None:
        watch.submitted_at = time.monotonic()
        self.gang.submit(watch.spec, watch.place.slot)

    def _advance(self, watch: RankWatch, log_size: int, events_size: int) -> None:
        if log_size > watch.log_size:
            watch.log_size = log_size
            self.watchdog.grew(watch.spec.rank)
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
        self.watchdog.heard(rank, event)
        self.inquiry.heard(rank, event)
        watch.heard(event)
        match event:
            case events.Failure(exit_code=ExitCode.PREEMPTED) if self.notice is not None:
                watch.preempted = True  # it has ended before it heard that it is to end, as others had
            case events.Failure():
                watch.fault = failure_fault.from_failure(rank, event)
                self._add_fault(watch.fault)
            case events.Entered():
                if all(other.entered for other in self.ranks):
                    self.telling.training(tuple(other.record() for other in self.ranks))
            case events.Waiting() if not self.stopping and not self.faults:
                self.inquiry.begin_for_wait()
            case events.Noticed():
                self._preempt(f"rank {rank} on host {watch.place.host} was sent SIGTERM")
            case events.FileSaved() if event.path.startswith(f"{STACKS_FOLDER}/") and not self.faults:
                self.stacks.append((watch, event))  # those of ranks that turn out to be at work are not kept
            case events.CheckpointSaved() | events.FileSaved():
                self._send_porter(watch, event)
        self.telling.rank_event(rank, event)

    def _send_porter(self, watch: RankWatch, event: events.CheckpointSaved | events.FileSaved) -> None:
        fetch = None if watch.place.shared else partial(self.gang.fetch, watch.place.slot.worker)
        staging = watch.mirror.spool.staging
        self.errands += 1
        if isinstance(event, events.CheckpointSaved):
            self.porter.bring_checkpoint(watch.spec.rank, event, staging, fetch)
        else:
            self.porter.bring_file(watch.spec.rank, event, staging, fetch)

    def _on_exit(self, watch: RankWatch, ended: RankExit) -> None:
        self._advance(watch, ended.log_size, ended.events_size)
        self._take_events(watch)
        watch.ended = ended
        if watch.spec.code.is_script and watch.fault is None:  # os._exit is an end like any other
            watch.finished = watch.finished or ended.status == 0
            watch.preempted = watch.preempted or ended.status == ExitCode.PREEMPTED
        if watch.preempted:
            pass
        elif watch.finished:
            if ended.status != 0 and not self.stopping and watch.tracker_fault is None:
                self.telling.warn(
                    f"rank {ended.rank} finished its work, and ended with {describe_status(ended.status)} afterwards"
                )
        elif self.notice is not None and ended.status == -signal.SIGTERM:
            self._stop(failure_grace.at_once_s(self.ranks[0].spec))  # it never saves: there is nothing to wait for
        elif watch.fault is None and not self.stopping:
            watch.fault = failure_fault.from_exit(ended)
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
        stopped = watch.preempted or (self.stopping and watch.fault is None and not watch.finished)
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
        while self.stacks:
            self._send_porter(*self.stacks.pop(0))
        if self.stopping:
            return
        if fault.timed_out and not self.inquiry.begun:
            self.inquiry.begin(None)
        until = time.monotonic() + (failure_grace.VICTIM_SETTLE_S if fault.victim else failure_grace.SETTLE_S)
        self.settle_until = until if self.settle_until is None else min(self.settle_until, until)

    def _on_signal(self, signum: int) -> None:
        again = self.signum is not None
        self.signum = signum
        if signum == signal.SIGTERM and not again:
            self._preempt(was_sent(signum))
            return
        self.notice = None
        self.telling.status("stopping at once" if again else "stopping the ranks (again to kill them at once)")
        self._stop(0.0 if again else None)

    def _preempt(self, notice: str) -> None:
        """Have every rank finish its step, save, and end, within the grace that there is."""
        if self.notice is not None or self.stopping:
            return
        self.notice = notice
        grace_s = self.ranks[0].spec.supervision.grace_s
        if not all(watch.entered for watch in self.ranks):  # nothing is done yet that could be saved
            self._stop(failure_grace.at_once_s(self.ranks[0].spec))
            return
        self.telling.notice(
            f"{notice}: the ranks finish their step and save, within {grace_s:g} s (again to stop them)"
        )
        self.gang.tell([watch.spec for watch in self.ranks if not watch.over], _PREEMPT)
        self.preempt_until = time.monotonic() + grace_s - min(failure_grace.STOP_MARGIN_S, grace_s / 4)

    def _watch_presence(self) -> None:
        """Give up ranks that nobody else will tell of."""
        for loss in self.presence.losses(time.monotonic(), all_read=self.inbox.empty()):
            if loss.kind is Kind.WORKER_LOST:
                self._on_worker_lost(loss.watch.place.slot.worker, loss.text)
            else:
                self._give_up(loss.watch, loss.kind, loss.text)

    def _watch_progress(self) -> None:
        """Find out who is to blame where the ranks have stopped, and end the attempt."""
        now = time.monotonic()
        if self.stopping:
            return
        if self.inquiry.may_begin(now) and not self.faults and self.inbox.empty():
            hang = self.watchdog.overdue(now, self.ranks)
            if hang is not None:
                self.telling.status(f"no event or line for {hang.limit_s:g} s: asking the ranks where they are")
                self.inquiry.begin(hang)
        hung = self.inquiry.result(now)
        if hung is None and not self.inquiry.begun:
            self.stacks.clear()
        if hung is None or not all(fault.victim for fault in self.faults):
            return
        watch = self.ranks[hung.rank]
        watch.fault = watch.fault or hung
        self._add_fault(hung)
        self._stop(failure_grace.hung_s(self.ranks[0].spec))

    def _watch_deadlines(self) -> None:
        """Go on with the stopping of the gang when its next moment has come."""
        now = time.monotonic()
        if self.settle_until is not None and now >= self.settle_until and not self.inquiry.under_way:
            self.settle_until = None
            if not self.stopping:
                self.telling.status("stopping the other ranks")
                self._stop(None, spare_failed=True)
                self.spare_until = now + failure_grace.CLEAN_UP_S
        if self.preempt_until is not None and now >= self.preempt_until:
            self.preempt_until = None
            if not self.stopping:
                if not all(watch.well for watch in self.ranks if not watch.over):  # else they wait for their trackers
                    self.telling.warn("the ranks have not come to ctx.checkpoint() in time: they are stopped")
                self._stop(1.0)
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
        grace = self.ranks[0].spec.supervision.grace_s if grace_s is None else grace_s
        until = time.monotonic() + grace + failure_grace.STOP_MARGIN_S
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
