"""The attempt as a pure state machine: step(state, message, now) returns the next state and the actions.

This module uses no input or output, no clock and no threads. loop.py reads messages and executes the actions.

    rank 0's worker opens the store ─ all ranks start ─ fault, hang, signal, preemption ─ stopping ─ over

A signal to the driver asks the ranks to save and end, the second stops them, the third kills them. What a rank reports
after that is a fault only if it is no consequence of the end.

After a fault there is a short wait, because the root cause may arrive after its victims. Then the other ranks are
stopped, and after CLEAN_UP_S also the rank that failed. A rank that does not end in time is lost, so that every attempt
ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ddptrain.driver.attempt import actions, inbox
from ddptrain.driver.attempt.actions import Action
from ddptrain.driver.attempt.inbox import Message
from ddptrain.driver.attempt.rank_state import RankState
from ddptrain.driver.attempt.state import AttemptState, Draft, Moment
from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure import grace_periods
from ddptrain.driver.failure.fault import Fault, FaultKind, Loss
from ddptrain.driver.failure.run_end import was_sent
from ddptrain.driver.failure.watchdog import Activity, Hang, is_stacks_file
from ddptrain.errors import ExitCode
from ddptrain.protocol import events, worker_notices
from ddptrain.protocol.commands import Command
from ddptrain.protocol.worker_notices import Notice, RankExit, describe_status
from ddptrain.results.errors import UnsafePath

# Other signals to the driver than SIGTERM that a script gets as they are.
_PASSED_ON: dict[int, Command] = {
    signal.SIGINT: Command.INTERRUPT,
    signal.SIGHUP: Command.HANG_UP,
    signal.SIGQUIT: Command.QUIT,
}


def step(state: AttemptState, message: Message, now: Moment) -> tuple[AttemptState, Sequence[Action]]:
    """Return the next state and the actions, in order. Every message is accepted in every state."""
    work = Transition(state, now)
    work.handle(message)
    if work.state.inquiry.under_way and not work.state.stopping:
        work.conclude_inquiry()
    return work.state, work.actions


class Transition(Draft):
    """One step of the state machine, while it is being computed."""

    def handle(self, message: Message) -> None:
        """Change the state and add actions after a message."""
        match message:
            case Notice():
                self._on_notice(message)
            case inbox.RankEvent(rank, event, count):
                self._on_event(rank, event, count)
            case inbox.OutputRead():
                self._on_output_read(message)
            case inbox.Tick():
                self._on_tick(message)
            case inbox.Begin():
                self._submit(lambda watched: watched.worker == self.state.ranks[0].worker)
            case inbox.TaskFailed(attempt, rank, text) if attempt == self.attempt and rank < len(self.state.ranks):
                self._give_up(rank, Loss(FaultKind.INFRASTRUCTURE, text))
            case inbox.WorkerLost(address, reason):
                self._on_worker_lost(address, reason)
            case inbox.SignalReceived(signum):
                self._on_signal(signum)
            case _:
                self._on_results(message)

    def _on_results(self, message: Message) -> None:
        """Handle a message about a metric, or the transfer of a checkpoint or file to the run directory."""
        match message:
            case inbox.NotFinite(rank, reason):
                fault = Fault(rank, FaultKind.NAN, self.time_ns, reason)
                self.change_rank(rank, fault=fault)
                self._add_fault(fault)
                self._stop(self.grace_s)  # the rank itself goes on
            case inbox.ArtifactRetried(_, what, error, failure):
                self.do(actions.Warn(f"{what} could not be saved ({failure}): {error}"))
            case inbox.ResultsLost(lost):
                self.change(loss=lost)
                self._stop(self.grace_s)
            case inbox.ArtifactStored(rank, path, step):
                self.change(transfers=self.state.transfers - 1)
                if step is not None:
                    self.change(saved_at=self.now)
                self.do(actions.RecordStored(rank, path, step))
            case inbox.ArtifactFailed(rank, what, failed, vital, unreachable):
                self.change(transfers=self.state.transfers - 1)
                if vital:
                    kind = FaultKind.INFRASTRUCTURE if unreachable else FaultKind.RESULTS
                    kind = FaultKind.REFUSED if isinstance(failed, UnsafePath) else kind
                    self._add_fault(Fault(rank, kind, self.time_ns, f"{what} could not be saved: {failed}"))
                else:
                    self.do(actions.Warn(f"{what} of rank {rank} could not be saved: {failed}"))

    def _on_notice(self, notice: Notice) -> None:
        rank = notice.rank
        if notice.attempt != self.attempt:
            return  # of an earlier attempt
        if rank >= len(self.state.ranks):
            self.do(actions.RejectNotice(f"{notice.kind}: there is no rank {rank}"))
            return
        self.put_activity(rank, self._activity_after(notice))
        match notice:
            case worker_notices.Growth(log_size=log_size, events_size=events_size):
                self.do(actions.ReadOutput(rank, log_size, events_size))
            case RankExit(log_size=log_size, events_size=events_size):
                self.do(actions.ReadOutput(rank, log_size, events_size, ended=notice))
            case worker_notices.OutputBytes():
                self.do(actions.ReceiveOutput(notice))
            case worker_notices.StoreOpened() if rank == 0:
                # While the group is stopping, ranks that were not submitted are already lost.
                self._submit(lambda watched: not watched.submitted_at and not watched.over, notice.port)
            case worker_notices.SystemSample():
                self.do(actions.RecordSystem(notice))
            case worker_notices.Broken(message=text):
                self._give_up(rank, Loss(FaultKind.INFRASTRUCTURE, text))
            case worker_notices.Leaving():
                place = self.state.ranks[rank].place
                self.change(leaving=True)
                self.do(actions.AvoidWorker(place.slot.worker))
                self._preempt(f"the worker on host {place.host} was sent SIGTERM")

    def _activity_after(self, notice: Notice) -> Activity:
        activity = self.state.activities[notice.rank].noticed(self.now)
        match notice:
            case worker_notices.Growth(log_size=log_size) | RankExit(log_size=log_size):
                return activity.grew(log_size, self.now)
            case worker_notices.Alive(cpu_s=cpu_s, gpu_percent=gpu_percent):
                if cpu_s is not None:
                    activity = self.state.watchdog.after_cpu(activity, cpu_s, self.now)
                return activity if gpu_percent is None else activity.used_gpu(gpu_percent, self.now)
        return activity

    def _submit(self, chosen: Callable[[RankState], bool], port: int = 0) -> None:
        """Start the chosen ranks: those of rank 0's worker, which opens the store, or all others, which join it."""
        ranks = tuple(rank for rank, watched in enumerate(self.state.ranks) if chosen(watched))
        for rank in ranks:
            self.change_rank(rank, submitted_at=self.now)
        if ranks:
            self.do(actions.SubmitRanks(ranks, port))

    def _on_event(self, rank: int, event: events.Event, count: int) -> None:
        self._apply_event(rank, event, count)
        match event:
            case events.Failure():
                self._on_failure(rank, event)
            case events.Entered() if self.state.outside == 0:
                self.do(actions.RecordTraining())
            case events.Noticed():
                self._preempt(f"rank {rank} on host {self.state.ranks[rank].place.host} was sent SIGTERM")
            case events.FileSaved() if is_stacks_file(event) and not self.state.faults:
                if self.state.inquiry.begun:  # a late answer is not kept
                    self.change(stacks=(*self.state.stacks, (rank, event)))
            case events.CheckpointSaved() | events.FileSaved():
                self._fetch(rank, event)

    def _on_failure(self, rank: int, failure: events.Failure) -> None:
        if failure.exit_code == ExitCode.PREEMPTED and self.state.notice is not None:
            self.change_rank(rank, preempted=True)  # it was preempted by another signal before the command reached it
            return
        ends_itself = failure.exit_code is not None or failure.type == KeyboardInterrupt.__name__
        if ends_itself and self.state.ordered and self.state.ranks[rank].spec.code.is_script:
            return
        if failure.handled and (self._knows_cause() or not self.state.faults):
            return  # no fault needs this explanation, and the code may continue after its `except`
        fault = failure_fault.from_failure(rank, failure)
        self.change_rank(rank, fault=fault)
        self._add_fault(fault)

    def _apply_event(self, rank: int, event: events.Event, count: int) -> None:
        """Update the activity, the inquiry and the state of the rank after an event."""
        state = self.state
        self.put_activity(rank, state.watchdog.after_event(state.activities[rank], event, self.now, count))
        if (inquiry := state.inquiry.after(rank, event)) is not state.inquiry:
            self.change(inquiry=inquiry)
        if (watched := state.ranks[rank].after(event)) is not state.ranks[rank]:
            if isinstance(event, events.Finished) and state.ordered and watched.spec.code.is_script:
                watched = watched._replace(finished=False, preempted=True)  # the signal may have ended its work early
            self.put_rank(rank, watched)

    def _fetch(self, rank: int, event: events.CheckpointSaved | events.FileSaved) -> None:
        self.change(transfers=self.state.transfers + 1)
        self.do(actions.FetchArtifact(rank, event))

    def _on_output_read(self, read: inbox.OutputRead) -> None:
        rank = read.rank
        if read.error and not self.state.ranks[rank].over and not self.state.stopping:
            self._lose(rank, Loss(FaultKind.INFRASTRUCTURE, f"its output could not be read: {read.error}"))
        if read.ended is not None:
            self._on_exit(rank, read.ended)
        if read.loss is not None:
            self._lose(rank, read.loss)

    def _on_exit(self, rank: int, ended: RankExit) -> None:
        before = self.state.ranks[rank]
        if before.ended is not None:
            return
        is_script = before.spec.code.is_script
        self.change_rank(rank, ended=ended)
        if is_script and before.fault is None:
            self._judge_script(before, ended.status)
        watched = self.state.ranks[rank]
        if watched.preempted or (is_script and self.state.ordered and _ends_itself(ended.status)):
            pass
        elif watched.finished:
            if ended.status != 0 and not self.state.stopping and watched.tracker_fault is None:
                text = f"rank {rank} finished its work, and ended with {describe_status(ended.status)} afterwards"
                self.do(actions.Warn(text))
        elif not is_script and self.state.notice is not None and ended.status == -signal.SIGTERM:
            # The workload never saves, so there is no reason to wait.
            self._stop(grace_periods.at_once_s(self.state.ranks[0].spec))
        elif watched.fault is None and not self.state.stopping:
            where = "after the end of its main thread" if before.finished else "in the middle of the workload"
            fault = failure_fault.from_exit(ended, where)
            self.change_rank(rank, fault=fault)
            self._add_fault(fault)
        if not before.over:
            self._record_end(rank)

    def _judge_script(self, before: RankState, status: int) -> None:
        """Set the result of a script to that of its process: it may end with os._exit, or because of another thread."""
        rank, ordered = before.spec.rank, self.state.ordered
        if status == 0 and not before.well:
            self.change_rank(rank, finished=not ordered, preempted=ordered)
        elif status == ExitCode.PREEMPTED:
            self.change_rank(rank, finished=False, preempted=True)
        elif status != 0 and before.tracker_fault is None and not (ordered or self.state.stopping):
            self.change_rank(rank, finished=False)

    def _record_end(self, rank: int) -> None:
        watched = self.state.ranks[rank]
        ends = self.state.stopping or self.state.ordered
        stopped = watched.preempted or (ends and watched.fault is None and not watched.finished)
        self.do(actions.RecordRankEnd(rank, ok=watched.finished, stopped=stopped))

    def _on_worker_lost(self, address: str, reason: str) -> None:
        self.do(actions.AvoidWorker(address, lost=True))
        for watched in self.state.ranks:
            if watched.worker == address:
                host = watched.place.host
                text = reason or f"the Dask worker {address} of host {host} was lost"
                self._give_up(watched.spec.rank, Loss(FaultKind.WORKER_LOST, text))

    def _give_up(self, rank: int, loss: Loss) -> None:
        """Mark a rank as lost after the rest of its files has been read: it will send no more notices."""
        if not self.state.ranks[rank].over:
            self.do(actions.ReadRest(rank, loss))

    def _lose(self, rank: int, loss: Loss) -> None:
        if self.state.ranks[rank].over:
            return
        self.change_rank(rank, lost=True)
        if not self.state.stopping and self.state.ranks[rank].fault is None:
            fault = Fault(rank, loss.kind, self.time_ns, loss.text)
            self.change_rank(rank, fault=fault)
            self._add_fault(fault)
        self._record_end(rank)

    def _add_fault(self, fault: Fault) -> None:
        stacks = self.state.stacks
        self.change(stacks=())
        if not self._is_consequence(fault):
            self.change(faults=(*self.state.faults, fault))
        self.do(actions.RecordFault(fault))
        for rank, event in stacks:
            self._fetch(rank, event)
        if self.state.stopping:
            return
        if fault.timed_out and not self.state.inquiry.begun:
            self._begin_inquiry()
        until = self.now + (grace_periods.VICTIM_SETTLE_S if fault.victim else grace_periods.SETTLE_S)
        if all(rank.over or rank.fault is not None for rank in self.state.ranks) and self._knows_cause():
            until = self.now  # no earlier fault can arrive
        self.change(settle_until=_earlier(self.state.settle_until, until))

    def _is_consequence(self, fault: Fault) -> bool:
        """Return whether a fault only results from the end of the ranks that a signal or a notice has asked for."""
        if not self.state.ordered or fault.kind in (FaultKind.RESULTS, FaultKind.REFUSED):
            return False
        return fault.victim or fault.kind in failure_fault.LOSSES or self.state.stopping

    def _knows_cause(self) -> bool:
        return any(not fault.victim for fault in self.state.faults)

    def _on_signal(self, signum: int) -> None:
        signals = self.state.signals + 1
        if signals == 1 and self.state.stopping and not self.state.over:
            signals = 2  # the ranks cannot save any more
        self.change(signals=signals, signum=signum)
        if self.state.over:
            self.do(actions.Announce(f"{was_sent(signum)}: the last files are being saved (again to end without them)"))
        elif signals == 1:
            self._preempt(was_sent(signum), signum)
        else:
            self.change(notice=None)
            kills = signals > 2
            self.do(actions.ShowStatus("killing the ranks" if kills else "stopping (again: kills the ranks)"))
            self._stop(0.0 if kills else self.grace_s)

    def _preempt(self, notice: str, signum: int = signal.SIGTERM) -> None:
        """Command every rank to finish its step, save and end, within the grace period. Scripts get the signal."""
        if self.state.notice is not None or self.state.stopping or self.state.faults:
            return
        self.change(notice=notice, noticed_at=self.now)
        first = self.state.ranks[0].spec
        if self.state.outside:  # nothing could be saved yet
            self._stop(grace_periods.at_once_s(first))
            return
        what = "the ranks finish their step and save"
        if first.code.is_script:
            what = f"the script gets {signal.Signals(signum).name} and ends"
        self.do(actions.Announce(f"{notice}: {what}, within {self.grace_s:g} s (again to stop the ranks)"))
        command = _PASSED_ON.get(signum, Command.PREEMPT) if first.code.is_script else Command.PREEMPT
        self.do(actions.SendCommand(self.alive(), command))
        self.change(preempt_until=self.now + grace_periods.preempt_s(first))

    def _on_tick(self, tick: inbox.Tick) -> None:
        heartbeat, suspended_s = self.state.heartbeat.checked(self.now, connected=tick.connected)
        self.change(heartbeat=heartbeat)
        if (loss := heartbeat.lost_cluster(self.now, tick.worker_fault)) is not None:
            for worker in dict.fromkeys(rank.worker for rank in self.state.ranks):
                self._on_worker_lost(worker, loss.text)
        if suspended_s:
            shifted = (activity.shifted(suspended_s, self.now) for activity in self.state.activities)
            self.change(activities=tuple(shifted))
        if tick.read_until is not None:
            for watched, loss in heartbeat.lost_ranks(self.state.ranks, self.state.activities, tick.read_until):
                if loss.kind is FaultKind.WORKER_LOST:
                    self._on_worker_lost(watched.worker, loss.text)
                else:
                    self._give_up(watched.spec.rank, loss)
            self._suspect(tick.read_until)
        self._check_deadlines()

    def _suspect(self, read_until: float) -> None:
        """Begin an inquiry if the ranks may hang, judged by what had arrived at `read_until`. Show their silence."""
        state = self.state
        quiet = "" if state.stopping else state.watchdog.silence(state.ranks, state.activities, read_until)
        if quiet != state.quiet:
            self.change(quiet=quiet)
            self.do(actions.ShowStatus(quiet, silence=True))
        if state.stopping or state.faults or not state.inquiry.may_begin(self.now):
            return
        hang = state.watchdog.overdue(state.ranks, state.activities, read_until)
        if hang is not None:
            if read_until - hang.silent_s >= state.inquiry.not_before:  # else an inquiry has just found a rank working
                silent = f"no report or line for {hang.silent_s:.0f} s"
                self.do(actions.ShowStatus(f"{silent}: asking the ranks where they are"))
            self._begin_inquiry(hang)

    def _begin_inquiry(self, hang: Hang | None = None) -> None:
        state = self.state
        parts = (state.ranks, state.activities, state.watchdog, self.now)
        self.change(inquiry=state.inquiry.begin(hang, *parts))
        self.do(actions.SendCommand(self.alive(), Command.STACKS))

    def conclude_inquiry(self) -> None:
        """End the attempt if the stacks show which rank is missing."""
        inquiry, hung = self.state.inquiry.result(self.state.ranks, self.now, self.time_ns)
        self.change(inquiry=inquiry)
        if hung is None:
            if not inquiry.begun:
                self.change(stacks=())
            return
        if all(fault.victim for fault in self.state.faults):
            if self.state.ranks[hung.rank].fault is None:
                self.change_rank(hung.rank, fault=hung)
            self._add_fault(hung)
            self._stop(grace_periods.hung_s(self.state.ranks[0].spec))

    def _check_deadlines(self) -> None:
        if self._is_due(self.state.settle_until) and not self.state.inquiry.under_way:
            self.change(settle_until=None)
            if not self.state.stopping:
                self.do(actions.ShowStatus("stopping the other ranks"))
                self._stop(self.grace_s, spare_failed=True)
                self.change(spare_until=self.now + grace_periods.CLEAN_UP_S)
        if self._is_due(self.state.preempt_until):
            self.change(preempt_until=None)
            if not self.state.stopping:
                if not all(rank.well for rank in self.state.ranks if not rank.over):  # else only trackers work
                    missed = "end" if self.state.ranks[0].spec.code.is_script else "call ctx.checkpoint()"
                    self.do(actions.Warn(f"the ranks did not {missed} in time: they are stopped"))
                self._stop(grace_periods.PREEMPT_STOP_S)
        if self._is_due(self.state.spare_until):
            self.change(spare_until=None)
            if (cause := self.state.cause()) is not None:
                self.do(actions.ShowCause(cause))
            self._stop(self.grace_s)
        if self._is_due(self.state.stop_until):
            for rank in range(len(self.state.ranks)):
                self._give_up(rank, Loss(FaultKind.INFRASTRUCTURE, "it did not end"))

    def _stop(self, grace_s: float, *, spare_failed: bool = False) -> None:
        """Stop every rank that is not over.

        Ranks that were never submitted are lost. `spare_failed`: not the failed rank.
        """
        until = self.now + grace_s + grace_periods.STOP_MARGIN_S
        self.change(stop_until=_earlier(self.state.stop_until, until))
        stopped = []
        for rank, watched in enumerate(self.state.ranks):
            failed = watched.fault is not None and not watched.fault.victim
            if watched.over or (spare_failed and failed):
                continue
            if watched.submitted_at:
                stopped.append(rank)
            else:
                self.change_rank(rank, lost=True)
        if stopped:
            self.do(actions.StopRanks(tuple(stopped), grace_s))

    def _is_due(self, until: float | None) -> bool:
        return until is not None and self.now >= until


def _ends_itself(status: int) -> bool:
    """Return whether a process has chosen its exit code, or died of a signal that asks to end."""
    return status > 0 or -status in (signal.SIGTERM, *_PASSED_ON)


def _earlier(before: float | None, until: float) -> float:
    return until if before is None else min(before, until)
