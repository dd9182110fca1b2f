"""One attempt: what happens to its ranks, and what the driver does about it.

    rank 0's worker opens the store ─ all ranks start ─ fault, hang, signal, preemption ─ stopping ─ over

A signal to the driver asks the ranks to save and end, the second stops them, the third kills them. What a rank reports
after that is a fault only if it is no consequence of the end.

After a fault there is a short wait, because the root cause may arrive after its victims. Then the other ranks are
stopped, and after CLEAN_UP_S also the rank that failed. A rank that does not end in time is lost, so that every attempt
ends.

The attempt reads no clock: each call says what time it is. It acts through the worker group, the ranks' output, the
transfers and the recorder. AttemptLoop calls it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import queue
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from ddptrain.driver import fault as failure_fault
from ddptrain.driver import inbox
from ddptrain.driver.fault import Fault, FaultKind, find_root_cause
from ddptrain.driver.hang import Inquiry
from ddptrain.driver.output import RankOutput
from ddptrain.driver.ranks import AttemptEnd, Rank
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.run_end import describe_fault, was_sent
from ddptrain.driver.transfer.transfer_queue import TransferQueue
from ddptrain.driver.watchdog import Hang, Watchdog, is_stacks_file
from ddptrain.driver.workers import Workers
from ddptrain.errors import ExitCode
from ddptrain.log import Log
from ddptrain.protocol import deadlines, events
from ddptrain.protocol.commands import FORWARDED, OF_SIGNALS, Command
from ddptrain.protocol.news import News, RankExit, RankNews, describe_status
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.results.errors import UnsafePath

_SCHEDULER_LOST_S = 3.0  # after this time without a connection to the scheduler, the attempt ends
_SUSPENDED_S = 3.0  # after this time between two ticks, this process itself was suspended, and received no messages
_DEBUG_PAUSE_S = 2.0  # between two steps in the debugger
LAST_SIGNAL = 3  # that asks to end: it kills the ranks
_log = Log(__name__)


class Moment(NamedTuple):
    """When something is handled: monotonic seconds, and nanoseconds of the wall clock."""

    monotonic: float
    time_ns: int


class Phase(IntEnum):
    """What an attempt does."""

    STARTING = 1  # not all ranks have entered the workload
    RUNNING = 2
    SAVING = 3  # a signal or a leaving worker has asked the ranks to save and end
    SETTLING = 4  # a rank has failed: an earlier fault may arrive
    STOPPING = 5  # the ranks are being stopped
    OVER = 6  # every rank has ended or is lost


class Attempt:
    """The ranks of an attempt from their start to their end. Nothing is handled while something else is.

    outcome: its result as far as it is known. faults: without mere consequences of a signal or a notice. signals: the
    number of signals to the driver. transfers: checkpoints and files on their way into the run directory. running:
    ranks that are not over.
    All deadlines are monotonic seconds, infinite if they are not set.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        workers: Workers,
        output: RankOutput,
        transfer: TransferQueue,
        recorder: Recorder,
        watchdog: Watchdog,
        now: Moment,
    ) -> None:
        self.ranks = list(ranks)
        self.workers, self.output, self.transfer, self.recorder = workers, output, transfer, recorder
        self.watchdog, first = watchdog, self.ranks[0].spec
        self.lost_after_s = first.config.failure.lost_after_s
        self.debugged = self.ranks[first.debug.rank] if first.debug is not None else None
        self.number, self.grace_s, self.is_script = first.attempt, first.config.failure.grace_s, first.code.is_script
        self.faults: list[Fault] = []
        self.signals = 0
        self.outcome = AttemptEnd(self.ranks)
        self.transfers = 0
        self.running = len(self.ranks)
        self.settle_until = math.inf  # end of the wait for an earlier fault
        self.preempt_until = math.inf  # when ranks must have saved
        self.stop_until = math.inf  # when stopped ranks are given up
        self.spare_until = math.inf  # when also the rank that failed is stopped
        self.debug_until = 0.0  # faults wait until the user has left the debugger
        self._now, self._time_ns = now
        self._inquiry = Inquiry()
        self._stacks: list[tuple[int, events.FileSaved]] = []  # stored only if the inquiry finds a fault
        self._by_worker: dict[str, list[int]] = {}
        for number, each in enumerate(self.ranks):
            self._by_worker.setdefault(each.worker, []).append(number)
        self._outside = len(self.ranks)  # ranks that have not entered the workload
        self._noticed_at = 0.0
        self._saved_at: float | None = None  # when the newest checkpoint of this attempt arrived
        self._quiet = ""  # for how long a rank has not reported, as shown
        self._connected_at = self._checked_at = now.monotonic

    @property
    def phase(self) -> Phase:
        """What the attempt does; it never goes back."""
        if self.running == 0:
            return Phase.OVER
        if self.stopping:
            return Phase.STOPPING
        if self.faults:
            return Phase.SETTLING
        return Phase.SAVING if self.ordered else Phase.STARTING if self._outside else Phase.RUNNING

    @property
    def over(self) -> bool:
        """Whether every rank has ended or is lost."""
        return self.running == 0

    @property
    def stopping(self) -> bool:
        """Whether the ranks are being stopped, or have been."""
        return self.stop_until < math.inf

    @property
    def ordered(self) -> bool:
        """Whether the ranks end because of a signal or a notice."""
        return self.outcome.signum is not None or self.outcome.notice is not None

    def due(self) -> float:
        """Return the next deadline in monotonic seconds. An inquiry in progress suspends settle_until."""
        settled = self._inquiry.until if self._inquiry.under_way else max(self.settle_until, self.debug_until)
        waits = math.inf if self.stopping else settled
        return min(waits, self.spare_until, self.preempt_until, self.stop_until)

    def cause(self) -> Fault | None:
        """Return the root cause of the faults so far; None without a fault."""
        if not self.faults:
            return None
        finished = [rank.spec.rank for rank in self.ranks if rank.finished]
        cause = find_root_cause(self.faults, finished)
        return failure_fault.add_thread_failure(cause, self.ranks[cause.rank].thread_failure)

    def end(self, unsaved: str = "") -> AttemptEnd:
        """Return the result of the attempt. Must be called only when it is over. `unsaved`: see AttemptEnd."""
        self.outcome.fault, self.outcome.unsaved = self.cause(), unsaved
        if self._saved_at is not None:
            self.outcome.age_s = self._noticed_at - self._saved_at
        return self.outcome

    # --- what happens ---

    def begin(self, now: Moment) -> None:
        """Start the ranks of rank 0's worker, which opens the store."""
        self._now, self._time_ns = now
        self._submit([rank for rank in self.ranks if rank.worker == self.ranks[0].worker])

    def on_message(self, message: inbox.Message, now: Moment) -> None:
        """Handle a message. Every message is accepted at any time."""
        self._now, self._time_ns = now
        match message:
            case News():
                self._on_news(message)
            case inbox.TaskFailed(attempt, rank, text):
                if attempt == self.number and rank < len(self.ranks):
                    self._give_up(rank, text)
            case inbox.WorkerLost(address, reason):
                self._on_worker_lost(address, reason)
            case inbox.LineTyped(text) if self.debugged is not None:
                self.workers.tell([self.debugged.spec], Command.INPUT, text)
            case inbox.SignalReceived(signum, request):
                self._on_signal(signum, request)
            case inbox.OutputFetched(attempt, read):
                if attempt == self.number:
                    read()
            case inbox.ArtifactRetried(_, what, error, failure):
                self.recorder.warn(f"{what} could not be saved ({failure}): {error}")
            case inbox.ResultsLost(lost):
                self.outcome.loss = lost
                self._stop(self.grace_s)
            case inbox.ArtifactStored(rank, path, step):
                self.transfers -= 1
                if step is not None:
                    self._saved_at = self._now
                self.recorder.stored(rank, path, step)
            case inbox.ArtifactFailed():
                self._on_lost_file(message)
        self._conclude_inquiry()

    def on_tick(self, now: Moment, *, connected: bool, worker_fault: str | None, read_until: float) -> None:
        """Find out what happens without a message: silence, the end of the scheduler or of our worker, deadlines.

        worker_fault: why a worker process that the driver itself started has ended. read_until: all messages that had
        arrived at this time (monotonic seconds) have been read.
        """
        self._now, self._time_ns = now
        slept_s, self._checked_at = self._now - self._checked_at, self._now
        if connected:
            self._connected_at = self._now
        elif self._now - self._connected_at > _SCHEDULER_LOST_S:
            worker_fault = worker_fault or "the Dask scheduler has ended"
        if worker_fault is not None:
            for worker in dict.fromkeys(rank.worker for rank in self.ranks):
                self._on_worker_lost(worker, worker_fault)
        if slept_s > _SUSPENDED_S:
            for rank in self.ranks:
                rank.activity.skip(slept_s, self._now)
        self._check_silence(read_until)
        self._suspect(read_until)
        self._check_deadlines()
        self._conclude_inquiry()

    # --- messages of workers, and events of ranks ---

    def _on_news(self, news: News) -> None:
        if news.attempt != self.number:
            return  # of an earlier attempt
        of_worker = self._by_worker.get(news.worker, ())
        if not of_worker or any(part.rank not in of_worker for part in news.ranks):
            self.workers.reject(f"news of {news.worker} about ranks that it does not have")
            return
        for number in of_worker:
            self.ranks[number].activity.noticed(self._now)
        if news.store_port and 0 in of_worker:
            # While the group is stopping, ranks that were not submitted are already lost.
            self._submit([each for each in self.ranks if not each.submitted_at and not each.over], news.store_port)
        for part in news.ranks:
            self._on_rank_news(part)
        if news.sample is not None:
            self.recorder.system(news.sample)
            self._check_verdict()
        if news.leaving:
            place = self.ranks[of_worker[0]].place
            self.outcome.leaving = True
            self.workers.avoid(news.worker)
            self._preempt(f"the worker on host {place.host} was sent SIGTERM")

    def _on_rank_news(self, news: RankNews) -> None:
        rank, activity = news.rank, self.ranks[news.rank].activity
        if activity.grew(news.log_size, self._now):
            self.recorder.log_grew(rank)
        if news.cpu_s is not None:
            self.watchdog.on_cpu(activity, news.cpu_s, self._now)
        if news.gpu_percent is not None:
            activity.used_gpu(news.gpu_percent, self._now)
        if news.broken:
            self._give_up(rank, news.broken)
        else:
            self.output.read(news, lambda found, error: self._take(rank, found, error, news.ended))

    def _submit(self, chosen: Sequence[Rank], port: int = 0) -> None:
        """Start ranks: those of rank 0's worker, which opens the store, or all others, which join it on `port`."""
        for rank in chosen:
            rank.submitted_at = self._now
        if chosen:
            specs = [rank.spec.with_port(port) if port else rank.spec for rank in chosen]
            self.workers.submit(specs, [rank.place.slot for rank in chosen])

    def _take(self, rank: int, found: Iterable[events.Event], error: str = "", ended: RankExit | None = None) -> None:
        """Handle what was read of a rank's output: events, in order, and then its exit."""
        for (_, is_number), group in itertools.groupby(found, lambda event: (event.kind, event.is_number)):
            if is_number:
                numbers = list(group)
                self._on_event(rank, numbers[-1], len(numbers))
                self.recorder.rank_numbers(rank, numbers)
            else:
                for event in group:
                    self._on_event(rank, event)
                    self.recorder.rank_event(rank, event)
            self._check_verdict()
        if error and not self.stopping:
            self._give_up(rank, f"its output could not be read: {error}")
        if ended is not None:
            self._on_exit(rank, ended)

    def _on_event(self, rank: int, event: events.Event, count: int = 1) -> None:
        """Handle an event of a rank; of consecutive numbers the last one of `count`."""
        watched = self.ranks[rank]
        self.watchdog.on_event(watched.activity, event, self._now, count)
        had_entered = watched.entered
        watched.on_event(event)
        match event:
            case events.Failure():
                self._on_failure(watched, event)
            case events.Finished() if self.ordered and self.is_script:
                watched.finished, watched.preempted = False, True  # the signal may have ended its work early
            case events.Entered():
                self._outside -= not had_entered
                if self._outside == 0:
                    self.recorder.training(tuple(each.record() for each in self.ranks))
            case events.Noticed():
                self._preempt(f"rank {rank} on host {watched.place.host} was sent SIGTERM")
            case events.FileSaved() if is_stacks_file(event) and not self.faults:
                if self._inquiry.begun:  # a late answer is not kept
                    self._stacks.append((rank, event))
            case events.CheckpointSaved() | events.FileSaved():
                self._transfer(rank, event)
            case events.AsksForLine(log_size=size) if watched is self.debugged:
                self.debug_until = math.inf
                self.recorder.asks_for_line(rank, self.output.place_in_log(rank, size))
            case events.DebuggerLeft(quit=place) if watched is self.debugged:
                self._debugger_left(place)
        self._conclude_inquiry()

    def _on_failure(self, rank: Rank, failure: events.Failure) -> None:
        if failure.exit_code == ExitCode.PREEMPTED and self.outcome.notice is not None:
            rank.preempted = True  # it was preempted by another signal before the command reached it
            return
        ends_itself = failure.exit_code is not None or failure.type == KeyboardInterrupt.__name__
        if ends_itself and self.ordered and self.is_script:
            return
        if failure.handled and (self._knows_cause() or not self.faults):
            return  # no fault needs this explanation, and the code may continue after its `except`
        rank.fault = failure_fault.from_failure(rank.spec.rank, failure)
        self._add_fault(rank.fault)

    def _check_verdict(self) -> None:
        """End the attempt if the recorder says so, as for a value that is not finite: the rank itself would go on."""
        verdict, self.recorder.verdict = self.recorder.verdict, None
        if verdict is not None:
            rank, reason = verdict
            fault = self.ranks[rank].fault = Fault(rank, FaultKind.GUARD, self._time_ns, reason)
            self._add_fault(fault)
            self._stop(self.grace_s)

    def _debugger_left(self, place: str) -> None:
        self.debug_until = self._now + _DEBUG_PAUSE_S
        if place and not self.ordered:
            self.outcome.signum, self.outcome.quit = signal.SIGINT, f"the debugger was quit at {place}"
            self._stop(deadlines.at_once_s(self.ranks[0].spec))

    def _transfer(self, rank: int, event: events.CheckpointSaved | events.FileSaved) -> None:
        self.transfers += 1
        self.transfer.add(rank, event)

    def _on_lost_file(self, failed: inbox.ArtifactFailed) -> None:
        self.transfers -= 1
        text = f"could not be saved: {failed.error}"
        if not failed.vital:
            self.recorder.warn(f"{failed.what} of rank {failed.rank} {text}")
            return
        kind = FaultKind.INFRASTRUCTURE if failed.unreachable else FaultKind.RESULTS
        kind = FaultKind.REFUSED if isinstance(failed.error, UnsafePath) else kind
        self._add_fault(Fault(failed.rank, kind, self._time_ns, f"{failed.what} {text}"))

    # --- ends of ranks ---

    def _on_exit(self, number: int, ended: RankExit) -> None:
        rank = self.ranks[number]
        if rank.ended is not None:
            return
        was_over, had_finished = rank.over, rank.finished
        rank.ended = ended
        if self.is_script and rank.fault is None:
            self._judge_script(rank, ended.status)
        if rank.preempted or (self.is_script and self.ordered and _ends_itself(ended.status)):
            pass
        elif rank.finished:
            if ended.status != 0 and not self.stopping:
                text = f"rank {number} finished its work, and ended with {describe_status(ended.status)} afterwards"
                self.recorder.warn(text)
        elif not self.is_script and self.outcome.notice is not None and ended.status == -signal.SIGTERM:
            # The workload never saves, so there is no reason to wait.
            self._stop(deadlines.at_once_s(self.ranks[0].spec))
        elif rank.fault is None and not self.stopping:
            where = "after the end of its main thread" if had_finished else "in the middle of the workload"
            rank.fault = failure_fault.from_exit(number, ended, where)
            self._add_fault(rank.fault)
        if not was_over:
            self._record_end(rank)

    def _judge_script(self, rank: Rank, status: int) -> None:
        """Set the result of a script to that of its process: it may end with os._exit, or because of another thread."""
        if status == 0 and not rank.well:
            rank.finished, rank.preempted = not self.ordered, self.ordered
        elif status == ExitCode.PREEMPTED:
            rank.finished, rank.preempted = False, True
        elif status != 0 and not (self.ordered or self.stopping):
            rank.finished = False

    def _record_end(self, rank: Rank) -> None:
        self.running -= 1
        if rank is self.debugged:
            self.debug_until = 0.0
        ends = self.stopping or self.ordered
        stopped = rank.preempted or (ends and rank.fault is None and not rank.finished)
        if refused := self.output.refused(rank.spec.rank):
            self.recorder.warn(f"rank {rank.spec.rank} wrote {refused} invalid event lines; they were ignored")
        self.recorder.rank_ended(rank.record(), ok=rank.finished, stopped=stopped)

    def _on_worker_lost(self, address: str, reason: str) -> None:
        self.workers.forget(address)
        for rank in self.ranks:
            if rank.worker == address:
                text = reason or f"the Dask worker {address} of host {rank.place.host} was lost"
                self._give_up(rank.spec.rank, text, FaultKind.WORKER_LOST)

    def _give_up(self, number: int, text: str, kind: FaultKind = FaultKind.INFRASTRUCTURE) -> None:
        """Mark a rank as lost after the rest of its files has been read: it will send no more notices."""
        rank = self.ranks[number]
        if not rank.over:
            self._take(number, self.output.rest(number))
        if rank.over:
            return
        rank.lost = True
        if not self.stopping and rank.fault is None:
            rank.fault = Fault(number, kind, self._time_ns, text)
            self._add_fault(rank.fault)
        self._record_end(rank)

    # --- faults, signals, preemption ---

    def _add_fault(self, fault: Fault) -> None:
        stacks, self._stacks = self._stacks, []
        if not self._is_consequence(fault):
            self.faults.append(fault)
        self.recorder.fault(fault)
        for rank, event in stacks:
            self._transfer(rank, event)
        if self.stopping:
            return
        if fault.timed_out and not self._inquiry.begun:
            self._begin_inquiry()
        if self.debugged and not self.debugged.over:  # the same error may open the debugger
            self.debug_until = max(self.debug_until, self._now + _DEBUG_PAUSE_S)
        until = self._now + (deadlines.VICTIM_SETTLE_S if fault.victim else deadlines.SETTLE_S)
        if all(rank.over or rank.fault is not None for rank in self.ranks) and self._knows_cause():
            until = self._now  # no earlier fault can arrive
        self.settle_until = self._earlier("settle", self.settle_until, until)

    def _is_consequence(self, fault: Fault) -> bool:
        """Return whether a fault only results from the end of the ranks that a signal or a notice has asked for."""
        if not self.ordered or fault.kind in (FaultKind.RESULTS, FaultKind.REFUSED):
            return False
        return fault.victim or fault.kind in failure_fault.LOSSES or self.stopping

    def _knows_cause(self) -> bool:
        return any(not fault.victim for fault in self.faults)

    def _pass_on(self, signum: int) -> None:
        name, specs = signal.Signals(signum).name, [rank.spec for rank in self.ranks if rank.entered and not rank.over]
        if specs:
            self.recorder.notice(f"{was_sent(signum)}: the ranks get it, too")
            self.workers.tell(specs, FORWARDED[signum])
        else:
            self.recorder.warn(f"{was_sent(signum)}, and no rank is in the workload: {name} has no effect")

    def _on_signal(self, signum: int, request: inbox.Request) -> None:
        if request is inbox.Request.FORWARD:
            self._pass_on(signum)
            return
        if request is inbox.Request.BREAK and self.debugged is not None and not self.debugged.over:
            self.workers.tell([self.debugged.spec], Command.BREAK)
            return
        kills = request is inbox.Request.STOP_NOW
        self.signals = LAST_SIGNAL if kills else self.signals + 1
        if self.signals == 1 and self.stopping and not self.over:
            self.signals = 2  # the ranks cannot save any more
        self.outcome.signum = signum
        if self.over:
            self.recorder.notice(f"{was_sent(signum)}: the last files are being saved (again to end without them)")
        elif self.signals == 1:
            self._preempt(was_sent(signum), signum)
        else:
            self.outcome.notice = None
            kills = self.signals >= LAST_SIGNAL
            self.recorder.status("killing the ranks" if kills else "stopping (again: kills the ranks)")
            self._stop(0.0 if kills else self.grace_s)

    def _preempt(self, notice: str, signum: int = signal.SIGTERM) -> None:
        """Command every rank to finish its step, save and end, within the grace period. Scripts get the signal."""
        if self.outcome.notice is not None or self.stopping or self.faults:
            return
        self.outcome.notice, self._noticed_at = notice, self._now
        first = self.ranks[0].spec
        if self._outside:  # nothing could be saved yet
            self._stop(deadlines.at_once_s(first))
            return
        what, status = "the ranks finish their step and save", "saving a checkpoint"
        if self.is_script:
            what, status = f"the script gets {signal.Signals(signum).name} and ends", "waiting for the script to end"
        self.recorder.notice(f"{notice}: {what}, within {self.grace_s:g} s (again to stop the ranks)")
        self.recorder.status(f"stopping: {status} (again: at once)", announced=True)
        command = OF_SIGNALS.get(signum, Command.PREEMPT) if self.is_script else Command.PREEMPT
        self.workers.tell(self._alive(), command)
        self.preempt_until = self._earlier("preempt", math.inf, self._now + deadlines.preempt_s(first))

    def _alive(self) -> list[RankSpec]:
        return [rank.spec for rank in self.ranks if not rank.over]

    def _stop(self, grace_s: float, *, spare_failed: bool = False) -> None:
        """Stop every rank that is not over.

        Ranks that were never submitted are lost. `spare_failed`: not the failed rank.
        """
        until = self._now + grace_s + deadlines.STOP_MARGIN_S
        self.stop_until = self._earlier("stop", self.stop_until, until)
        stopped = []
        for rank in self.ranks:
            failed = rank.fault is not None and not rank.fault.victim
            if rank.over or (spare_failed and failed):
                continue
            if rank.submitted_at:
                stopped.append(rank.spec)
            else:
                rank.lost = True
                self.running -= 1
        if stopped:
            self.workers.stop(stopped, grace_s)

    def _earlier(self, name: str, before: float, until: float) -> float:
        """Return the earlier one of two deadlines, and log a new one."""
        if before <= until:
            return before
        _log.info("deadline set", deadline=name, in_s=until - self._now)
        return until

    # --- time ---

    def _check_silence(self, read_until: float) -> None:
        """Give up ranks whose workers are silent for too long, because a cut network closes no connection, and ranks
        that their workers have not started in time.
        """
        waiting = [(rank, rank.activity.notice_at) for rank in self.ranks if rank.submitted_at and not rank.over]
        heard = [pair for pair in waiting if pair[1]]
        silent = [rank for rank, notice_at in heard if read_until - notice_at > self.lost_after_s]
        alone = len(silent) < len(heard) or len({rank.place.slot.host for rank, _ in heard}) == 1
        for rank in silent:
            host = f"host {rank.place.host}" if alone else "the cluster"
            text = f"no message came from {host} for {self.lost_after_s:g} s: is it down, or the network to it?"
            if not rank.over:
                self._on_worker_lost(rank.worker, text)
        limit_s = self.watchdog.start_timeout_s
        for rank, notice_at in waiting:
            if not notice_at and read_until - rank.submitted_at > limit_s:
                text = (
                    f"the Dask worker {rank.worker} of host {rank.place.host} has not started it within "
                    f"{limit_s:g} s (cluster.start_timeout_s): is this too short, or is the worker busy "
                    "with other tasks?"
                )
                self._give_up(rank.spec.rank, text)

    def _suspect(self, read_until: float) -> None:
        """Begin an inquiry if the ranks may hang, judged by what had arrived at `read_until`. Show their silence."""
        quiet = "" if self.phase >= Phase.STOPPING else self.watchdog.silence(self.ranks, read_until)
        if quiet != self._quiet:
            self._quiet = quiet
            self.recorder.silence(quiet)
        if self.phase >= Phase.SETTLING or not self._inquiry.may_begin(self._now):
            return
        if (hang := self.watchdog.overdue(self.ranks, read_until)) is not None:
            if read_until - hang.silent_s >= self._inquiry.not_before:  # else it has just found a rank working
                self.recorder.hang_suspected(f"no report or line for {hang.silent_s:.0f} s")
            self._begin_inquiry(hang)

    def _begin_inquiry(self, hang: Hang | None = None) -> None:
        self._inquiry.begin(hang, self.ranks, self.watchdog, self._now)
        _log.info("asking all ranks for their stacks")
        self.workers.tell(self._alive(), Command.STACKS)

    def _conclude_inquiry(self) -> None:
        """End the attempt if the stacks show which rank is missing."""
        if self.stopping or not self._inquiry.under_way:
            return
        hung = self._inquiry.conclude(self.ranks, self._now, self._time_ns)
        if hung is None:
            if not self._inquiry.begun:
                self._stacks.clear()
            return
        if all(fault.victim for fault in self.faults):
            self.ranks[hung.rank].fault = self.ranks[hung.rank].fault or hung
            self._add_fault(hung)
            self._stop(deadlines.hung_s(self.ranks[0].spec))

    def _check_deadlines(self) -> None:
        if self._now >= max(self.settle_until, self.debug_until) and not self._inquiry.under_way:
            self.settle_until = math.inf
            if not self.stopping:
                self.recorder.status("stopping the other ranks")
                self._stop(self.grace_s, spare_failed=True)
                self.spare_until = self._now + deadlines.CLEAN_UP_S
        if self._now >= self.preempt_until:
            self.preempt_until = math.inf
            if not self.stopping:
                if not all(rank.well for rank in self.ranks if not rank.over):  # else only trackers work
                    missed = "end" if self.is_script else "call ctx.checkpoint()"
                    self.recorder.warn(f"the ranks did not {missed} in time: they are stopped")
                self._stop(deadlines.PREEMPT_STOP_S)
        if self._now >= self.spare_until:
            self.spare_until = math.inf
            if (cause := self.cause()) is not None:
                # The end of the run, which names it, is not near.
                self.recorder.show_cause(cause, describe_fault(cause, self.ranks))
            self._stop(self.grace_s)
        if self._now >= self.stop_until:
            for rank in self.ranks:
                self._give_up(rank.spec.rank, "it did not end")


def _ends_itself(status: int) -> bool:
    """Return whether a process has chosen its exit code, or died of a signal that asks to end."""
    return status > 0 or -status in (signal.SIGTERM, *OF_SIGNALS)


# --- its messages and the clock ---


_TICK_S = 0.2  # between two checks of what sends no messages: a worker's process, the connection to the scheduler
_MIN_TICK_S = 0.05  # the shortest time between two checks, while the inbox is empty
_TICK_S_PER_RANK = 0.0005  # added for each rank, because each check reads the state of all ranks
_MAX_TICK_S = 1.0
_SILENCE = 10  # times lost_after_s: a transfer that moves no byte for so long has failed
_SHOWN_AFTER_S = 3.0  # the wait for transfers, when the ranks have ended
_WHY_LOST_S = 0.1  # from the end of a worker's connection until the exit status of its process is known


class AttemptLoop:
    """Starts the ranks of an attempt and watches them until all have ended."""

    def __init__(self, attempt: Attempt, inbox: inbox.Inbox, worker_fault: Callable[[], str | None]) -> None:
        self.attempt, self.inbox, self.worker_fault = attempt, inbox, worker_fault
        self.workers, self.transfer, self.recorder = attempt.workers, attempt.transfer, attempt.recorder
        self._silence_s = _SILENCE * attempt.lost_after_s
        self._tick_s = min(len(attempt.ranks) * _TICK_S_PER_RANK, _MAX_TICK_S)
        self._ticked_at = self._why_lost_until = 0.0
        # All messages that had arrived at _read_until have been read. Of those that were there at _counted_at, _unread
        # are left: silence must be judged even if the inbox is never empty.
        self._read_until = self._counted_at = 0.0
        self._unread = 0

    def run(self) -> AttemptEnd:
        """Start rank 0, the other ranks when its store is open, and watch until all ranks have ended or are lost."""
        self.attempt.begin(now())
        while not self.attempt.over:
            self._handle_next()
            self._tick()
        unsaved = self._drain()
        self.recorder.flush()
        return self.attempt.end(unsaved)

    def _drain(self) -> str:
        """Wait for the transfers of checkpoints and files as long as bytes move, or until another signal.

        Return what a signal has prevented from being saved, as text; "" for nothing. What is silent for too long is a
        fault.
        """
        enough = max(2, min(self.attempt.signals + 1, LAST_SIGNAL))  # the first signal asks to save
        show_at: float | None = time.monotonic() + _SHOWN_AFTER_S
        while self.attempt.transfers > 0:
            if self.attempt.signals >= enough:
                unsaved = [each.what for each in self.transfer.pending if each.vital]
                self.transfer.give_up()
                return ", ".join(unsaved)
            if self.transfer.silent_s > self._silence_s:
                error = TimeoutError(f"no byte was moved for {self._silence_s:g} s")
                for each in list(self.transfer.pending):
                    self.attempt.on_message(inbox.ArtifactFailed(each.rank, each.what, error, each.vital), now())
                self.transfer.give_up()
                break
            if show_at is not None and time.monotonic() > show_at:
                show_at = None
                self.recorder.status(f"saving {self.transfer.pending[0].what}" if self.transfer.pending else "saving")
            self._handle_next()
        return ""

    def _handle_next(self) -> None:
        if self.inbox.empty():
            self.recorder.flush()
        try:
            message = self.inbox.get(timeout=min(_TICK_S, max(0.0, self.attempt.due() - time.monotonic())))
        except queue.Empty:
            return
        if not isinstance(message, inbox.WorkerLost):
            self.attempt.on_message(message, now())
        elif not self.workers.has(message.address):  # else it was lost before this attempt, and is back
            lost = dataclasses.replace(message, reason=self._why_lost(message.address))
            self.attempt.on_message(lost, now())
        self._unread -= 1
        if self._unread <= 0:
            self._read_until = self._counted_at
            self._counted_at, self._unread = time.monotonic(), self.inbox.qsize()

    def _tick(self) -> None:
        """Check what sends no messages if it is time: at once if a deadline has passed, else at intervals, preferably
        with an empty inbox.
        """
        at, due, is_empty = time.monotonic(), self.attempt.due(), self.inbox.empty()
        tick_at = self._ticked_at + max(_MIN_TICK_S if is_empty else _TICK_S, self._tick_s)
        if at < min(tick_at, due):
            return
        self._ticked_at = at
        self.recorder.flush()
        if is_empty:
            self._read_until = self._counted_at = at
            self._unread = 0
        connected, fault = self.workers.connected, self.worker_fault()
        self.attempt.on_tick(now(), connected=connected, worker_fault=fault, read_until=self._read_until)

    def _why_lost(self, address: str) -> str:
        """Return why the driver's own worker process has ended; "" for other workers, or if it still runs.

        Waits only once, because many workers of another cluster may be lost together.
        """
        self._why_lost_until = self._why_lost_until or time.monotonic() + _WHY_LOST_S
        while (fault := self.worker_fault()) is None and time.monotonic() < self._why_lost_until:
            if all(rank.worker != address for rank in self.attempt.ranks):
                break
            time.sleep(0.01)
        return fault or ""


def now() -> Moment:
    """Return the time."""
    return Moment(time.monotonic(), time.time_ns())
