"""One attempt: the loop that reads messages, passes them to transition.py, and executes the actions."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ddptrain.driver.attempt import actions, inbox
from ddptrain.driver.attempt.actions import Action
from ddptrain.driver.attempt.inbox import Inbox, Message
from ddptrain.driver.attempt.rank_state import AttemptEnd, RankState
from ddptrain.driver.attempt.state import AttemptState, Moment, new_state
from ddptrain.driver.attempt.transition import step
from ddptrain.driver.failure.watchdog import Watchdog
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.transfer.log_mirror import LogMirror
from ddptrain.driver.transfer.transfer_queue import Source, TransferQueue
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.log import Log
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.protocol.worker_notices import RankExit
from ddptrain.worker.spool import rank_spool

_log = Log(__name__)
_TICK_S = 0.2  # between two checks of what sends no messages: a worker's process, the connection to the scheduler
_MIN_TICK_S = 0.05  # the shortest time between two checks, while the inbox is empty
_TICK_S_PER_RANK = 0.0005  # added for each rank, because each check reads the state of all ranks
_MAX_TICK_S = 1.0
_NUMBERS = (events.Metrics, events.Progress)  # for the state, only the newest of a rank matter
_SILENCE = 10  # times lost_after_s: a transfer that moves no byte for so long has failed
_SHOWN_AFTER_S = 3.0  # the wait for transfers, when the ranks have ended
_LAST_SIGNAL = 3  # the signal that kills the ranks
_WHY_LOST_S = 0.1  # from the end of a worker's connection until the exit status of its process is known


class Attempt:
    """Starts the ranks and watches them until all have ended."""

    def __init__(
        self,
        worker_group: WorkerGroup,
        ranks: Sequence[tuple[RankSpec, RankPlace, Path]],
        transfer: TransferQueue,
        recorder: Recorder,
        inbox: Inbox,
        worker_fault: Callable[[], str | None],
        watchdog: Watchdog,
        start_timeout_s: float,
        lost_after_s: float,
    ) -> None:
        """`ranks` has the spec, the place and the log file of each rank, in the order of ranks."""
        self.worker_group, self.transfer, self.recorder, self.inbox = worker_group, transfer, recorder, inbox
        self.worker_fault = worker_fault
        self.mirrors = [self._mirror(*rank) for rank in ranks]
        watched = [RankState(spec, place) for spec, place, _ in ranks]
        self.state = new_state(watched, watchdog, start_timeout_s, lost_after_s, _now())
        self._silence_s = _SILENCE * lost_after_s
        self._ticked_at = 0.0
        self._why_lost_until = 0.0
        self._marked = False  # a ReadMark is in the inbox
        self._fetching: dict[int, list[Callable[[], None]]] = {}  # rank -> what waits for its missing bytes
        self._tick_s = min(len(watched) * _TICK_S_PER_RANK, _MAX_TICK_S)

    def _mirror(self, spec: RankSpec, place: RankPlace, home_log: Path) -> LogMirror:
        spool = rank_spool(place.scratch, spec.run_id, spec.attempt, spec.rank)
        return LogMirror(
            spool, home_log, shared=place.shared, fetch=partial(self.worker_group.fetch, place.slot.worker)
        )

    def run(self) -> AttemptEnd:
        """Start rank 0, the other ranks when its store is open, and watch until all ranks have ended or are lost."""
        self.handle(inbox.Begin())
        while not self.state.over:
            self._handle_next()
            self._tick()
        unsaved = self._drain()
        self.recorder.flush()
        return self.state.end(unsaved)

    def _drain(self) -> str:
        """Wait for the transfers of checkpoints and files as long as bytes move, or until another signal.

        Return what a signal has prevented from being saved, as text; "" for nothing. What is silent for too long is a
        fault.
        """
        enough = max(2, min(self.state.signals + 1, _LAST_SIGNAL))  # the first signal asks to save
        show_at: float | None = time.monotonic() + _SHOWN_AFTER_S
        while self.state.transfers > 0:
            if self.state.signals >= enough:
                unsaved = [each.what for each in self.transfer.pending if each.vital]
                self.transfer.give_up()
                return ", ".join(unsaved)
            if self.transfer.silent_s > self._silence_s:
                self._fail_transfers()
                break
            if show_at is not None and time.monotonic() > show_at:
                show_at = None
                self.recorder.status(f"saving {self.transfer.pending[0].what}" if self.transfer.pending else "saving")
            self._handle_next()
        return ""

    def _fail_transfers(self) -> None:
        error = TimeoutError(f"no byte was moved for {self._silence_s:g} s")
        for each in list(self.transfer.pending):
            self.handle(inbox.ArtifactFailed(each.rank, each.what, error, each.vital))
        self.transfer.give_up()

    def _handle_next(self) -> None:
        if self.inbox.empty():
            self.recorder.flush()
        due, now = self.state.due(), time.monotonic()
        timeout_s = _TICK_S if due is None else min(_TICK_S, max(0.0, due - now))
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(message, inbox.ReadMark):
            self._marked = False
            self._look(message.put_at)
            return
        if isinstance(message, inbox.OutputFetched):
            self._fetched(message)
            return
        if isinstance(message, inbox.WorkerLost):
            if self.worker_group.has(message.address):
                return  # it was lost before this attempt, and is back
            message = dataclasses.replace(message, reason=self._why_lost(message.address))
        self.handle(message)

    def _tick(self) -> None:
        """Handle a Tick if one is due: at once if a deadline has passed, else at intervals, preferably with an empty
        inbox.
        """
        now, due, is_empty = time.monotonic(), self.state.due(), self.inbox.empty()
        tick_at = self._ticked_at + max(_MIN_TICK_S if is_empty else _TICK_S, self._tick_s)
        if now < tick_at and (due is None or now < due):
            return
        self._ticked_at = now
        self.recorder.flush()
        if not is_empty and not self._marked:  # silence must be judged even if the inbox is never empty
            self._marked = True
            self.inbox.put(inbox.ReadMark(now))
        self._look(now if is_empty else None)

    def _look(self, read_until: float | None) -> None:
        self.handle(inbox.Tick(self.worker_group.connected, self.worker_fault(), read_until))

    def handle(self, message: Message) -> None:
        """Pass a message to the state machine, and execute the actions."""
        before = self.state
        self.state, requested = step(before, message, _now())
        self._log_decisions(before)
        for action in requested:
            self._do(action)

    def _log_decisions(self, before: AttemptState) -> None:
        """Log decisions that are not actions: deadlines, and the basis of a hang diagnosis."""
        for name in ("settle_until", "preempt_until", "stop_until"):
            until = getattr(self.state, name)
            if until is not None and until != getattr(before, name):
                _log.info("deadline set", deadline=name.removesuffix("_until"), in_s=until - time.monotonic())
        inquiry = self.state.inquiry
        if inquiry.under_way and not before.inquiry.under_way:
            _log.info("asking all ranks for their stacks", signs_of_life=inquiry.signs)

    def _why_lost(self, address: str) -> str:
        """Return why the driver's own worker process has ended; "" for other workers, or if it still runs.

        Waits only once, because many workers of another cluster may be lost together.
        """
        self._why_lost_until = self._why_lost_until or time.monotonic() + _WHY_LOST_S
        while (fault := self.worker_fault()) is None and time.monotonic() < self._why_lost_until:
            if all(rank.worker != address for rank in self.state.ranks):
                break
            time.sleep(0.01)
        return fault or ""

    def _do(self, action: Action) -> None:
        match action:
            case actions.ReadOutput() | actions.ReceiveOutput() | actions.ReadRest():
                self._read_files(action)
            case actions.SubmitRanks(ranks, port):
                self._submit(ranks, port)
            case actions.StopRanks(ranks, grace_s):
                self.worker_group.stop(self._specs(ranks), grace_s)
            case actions.SendCommand(ranks, command):
                self.worker_group.tell(self._specs(ranks), command)
            case actions.FetchArtifact(rank, event):
                self._fetch(rank, event)
            case actions.AvoidWorker(address, lost):
                (self.worker_group.forget if lost else self.worker_group.avoid)(address)
            case actions.RejectNotice(reason):
                self.worker_group.reject(reason)
            case actions.RecordSystem(sample):
                self.recorder.system(sample)
            case _:
                self._record(action)

    def _read_files(self, action: actions.ReadOutput | actions.ReceiveOutput | actions.ReadRest) -> None:
        match action:
            case actions.ReadOutput(rank, log_size, events_size, ended):
                if self.mirrors[rank].log_grew(log_size):
                    self.recorder.display.log_grew(rank)
                needed = {"log": log_size, "events": events_size}
                self._read(rank, needed, lambda mirror: mirror.advance(log_size, events_size), ended=ended)
            case actions.ReceiveOutput(output):
                needed = {output.stream: output.offset}
                self._read(
                    output.rank, needed, lambda mirror: mirror.receive(output.stream, output.offset, output.data)
                )
            case actions.ReadRest(rank, loss):
                if self._place(rank).shared:
                    self.mirrors[rank].catch_up()
                if rank not in self._fetching:
                    self._take_events(rank)
                self.handle(inbox.OutputRead(rank, loss=loss))

    def _record(self, action: Action) -> None:
        recorder = self.recorder
        match action:
            case actions.RecordFault(fault):
                recorder.fault(fault)
            case actions.RecordTraining():
                recorder.training(tuple(rank.record() for rank in self.state.ranks))
            case actions.RecordRankEnd(rank, ok, stopped):
                if refused := self.mirrors[rank].refused:
                    recorder.warn(f"rank {rank} wrote {refused} invalid event lines; they were ignored")
                recorder.rank_ended(self.state.ranks[rank].record(), ok=ok, stopped=stopped)
            case actions.RecordStored(rank, path, step):
                recorder.stored(rank, path, step)
            case actions.Warn(text):
                recorder.warn(text)
            case _:
                self._show(action)

    def _show(self, action: Action) -> None:
        match action:
            case actions.ShowCause(fault):
                self.recorder.show_cause(fault)
            case actions.Announce(text, status):
                self.recorder.notice(text)
                if status:
                    self.recorder.status(status, announced=True)
            case actions.ShowStatus(text, silence):
                (self.recorder.display.silence if silence else self.recorder.status)(text)

    def _read(
        self,
        rank: int,
        needed: Mapping[str, int],
        read: Callable[[LogMirror], None],
        *,
        ended: RankExit | None = None,
    ) -> None:
        """Read output of a rank. If bytes before the sizes in `needed` must be fetched from its host, a thread waits
        for them, and what follows for this rank waits, too.
        """
        mirror = self.mirrors[rank]
        if rank in self._fetching:
            self._fetching[rank].append(lambda: self._read(rank, needed, read, ended=ended))
        elif any(mirror.lacks(stream, size) for stream, size in needed.items()):
            self._fetching[rank] = []
            attempt = self.state.ranks[rank].spec.attempt

            def fetch() -> None:
                error = self._error_of(rank, read)
                self.inbox.put(inbox.OutputFetched(attempt, rank, lambda: self._finish_read(rank, error, ended)))

            threading.Thread(target=fetch, name=f"ddptrain-output-{rank}", daemon=True).start()
        else:
            self._finish_read(rank, self._error_of(rank, read), ended)

    def _error_of(self, rank: int, read: Callable[[LogMirror], None]) -> str:
        """Read, and return the error as text, "" for none."""
        try:
            read(self.mirrors[rank])
        except Exception as raised:  # the files are on another machine, and their content is not trusted
            # If the worker is lost, a message says so, with the reason.
            return (str(raised) or repr(raised)) if self.worker_group.has(self._place(rank).slot.worker) else ""
        return ""

    def _finish_read(self, rank: int, error: str, ended: RankExit | None) -> None:
        self._take_events(rank)
        if error or ended is not None:
            self.handle(inbox.OutputRead(rank, ended=ended, error=error))

    def _fetched(self, message: inbox.OutputFetched) -> None:
        if message.attempt != self.state.ranks[0].spec.attempt:
            return  # of an earlier attempt
        waiting = self._fetching.pop(message.rank)
        message.read()
        for read in waiting:
            read()

    def _take_events(self, rank: int) -> None:
        """Handle new events.

        Of consecutive metrics or progress events all are recorded, but only the last is handled.
        """
        for kind, group in itertools.groupby(self.mirrors[rank].take_events(), type):
            if kind in _NUMBERS:
                numbers = list(group)
                self.handle(inbox.RankEvent(rank, numbers[-1], len(numbers)))
                self.recorder.rank_numbers(rank, numbers)
                for each in numbers:
                    self._check_finite(rank, each)
                continue
            for event in group:
                self.handle(inbox.RankEvent(rank, event))
                self.recorder.rank_event(rank, event)
                self._check_finite(rank, event)

    def _check_finite(self, rank: int, event: events.Event) -> None:
        if reason := self.recorder.not_finite(rank, event):
            self.handle(inbox.NotFinite(rank, reason))

    def _submit(self, ranks: Sequence[int], port: int) -> None:
        specs = [spec.with_port(port) if port else spec for spec in self._specs(ranks)]
        self.worker_group.submit(specs, [self._place(rank).slot for rank in ranks])

    def _fetch(self, rank: int, event: events.CheckpointSaved | events.FileSaved) -> None:
        if isinstance(event, events.CheckpointSaved):
            self.transfer.add_checkpoint(rank, event, self._source)
        else:
            source = self._source(rank)
            self.transfer.add_file(rank, event, source.staging, source.fetch)

    def _source(self, rank: int) -> Source:
        """Return where the staged files of a rank are. Raises LookupError if there is no such rank."""
        if rank < 0:
            raise LookupError(rank)
        place = self._place(rank)
        fetch = None if place.shared else partial(self.worker_group.fetch, place.slot.worker)
        return Source(self.mirrors[rank].spool.staging, fetch)

    def _place(self, rank: int) -> RankPlace:
        return self.state.ranks[rank].place

    def _specs(self, ranks: Sequence[int]) -> list[RankSpec]:
        return [self.state.ranks[rank].spec for rank in ranks]


def _now() -> Moment:
    return Moment(time.monotonic(), time.time_ns())
