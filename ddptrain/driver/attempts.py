"""Runs the attempts of one run: after a failure, another attempt from the newest checkpoint if the policy allows it."""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddptrain.clusters.compatibility import check_cluster
from ddptrain.config.run_config import FailureConfig
from ddptrain.config.wording import counted
from ddptrain.driver import inbox
from ddptrain.driver.attempt import LAST_SIGNAL, Attempt, Moment
from ddptrain.driver.failure.fault import LOSSES, Fault, FaultKind
from ddptrain.driver.failure.run_end import RunEnd, describe_fault, judge_attempt
from ddptrain.driver.failure.watchdog import new_watchdog
from ddptrain.driver.inbox import Inbox
from ddptrain.driver.output import RankOutput
from ddptrain.driver.rank_specs import RankSpecs
from ddptrain.driver.ranks import AttemptEnd, Rank, RankPlace
from ddptrain.driver.reservation import WaitHooks, request_for
from ddptrain.driver.tracking.setup import TrackingSetup
from ddptrain.driver.transfer.transfer_queue import TransferQueue
from ddptrain.driver.workers import Workers
from ddptrain.log import Log, set_context
from ddptrain.protocol import deadlines
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, newest_verified
from ddptrain.results.run_record import utc_now

if TYPE_CHECKING:
    from ddptrain.driver.connect import Session
    from ddptrain.driver.run import Run


_log = Log(__name__)


class Attempts:
    """Runs attempts of a run; the first one starts from the checkpoint of the run that it resumes, or from scratch."""

    def __init__(self, run: Run, session: Session, workers: Workers) -> None:
        self.of, self.client, self.target, self.workers = run, session.client, session.target, workers
        self.config, self.writer, self.display = run.config, run.writer, run.display
        self.recorder, self.signals = run.recorder, run.signals
        settings = self.config.checkpoint
        ignores_nan = self.recorder.nan == "ignore"
        self.policy = CheckpointPolicy(settings.keep, settings.metric, settings.mode, ignore_nan=ignores_nan)
        self.tracking = TrackingSetup(run.resolved, self.writer, os.environ, self.recorder.notice)
        self.specs = RankSpecs(run, workers, self.tracking)
        self.checkpoint = self._resumed()

    def _resumed(self) -> VerifiedCheckpoint | None:
        """Return the checkpoint that a resumed run starts from, or None, and show it to the user."""
        if self.of.choice is None or self.of.choice.folder is None:
            return None
        with self.signals.interrupting():
            checkpoint = newest_verified(self.writer.layout, lambda text: self.display.notice(text, level="warning"))
        from_start = ": the script starts again" if self.config.script else " from the start: it has no checkpoint"
        with_checkpoint = f" with the checkpoint of {checkpoint.description}" if checkpoint else from_start
        self.display.notice(f"resuming{with_checkpoint}")
        return checkpoint

    def run(self) -> RunEnd:
        """Run attempts until one ends the run; return how it ends."""
        restarts = RestartPolicy(self.config.failure)
        while True:
            end = self._attempt(self._reserved())
            run_end = judge_attempt(end, self.writer)
            self._record_end(end, run_end)
            step = self._last_step(end, end.fault.rank) if end.fault else None
            decision = restarts.after(end, step, scheduler_is_there=self.workers.connected)
            _log.info(
                "attempt ended",
                status=run_end.status,
                cause_rank=end.fault.rank if end.fault else None,
                cause=f"{end.fault.kind}: {end.fault.line}" if end.fault else None,
                step=step,
                then=decision,
            )
            match decision:
                case NoRestart(reason):
                    if reason:
                        self.recorder.warn(f"not started again: {reason}")
                    self._warn_of_rejected()
                    if end.fault is not None and not end.fault.victim and end.fault.line not in run_end.line:
                        # The run ends for another reason, such as a signal.
                        self.recorder.show_cause(end.fault, describe_fault(end.fault, end.ranks))
                    return run_end
                case Restart() as again:
                    if end.fault is not None:
                        self.recorder.show_cause(end.fault, describe_fault(end.fault, end.ranks))
                    self.recorder.attempt_over()
                    self._prepare_another(again, leaving=end.leaving)

    def _warn_of_rejected(self) -> None:
        if self.workers.rejected:
            self.recorder.warn(
                f"{self.workers.rejected} messages of workers were not valid and were ignored; the first: "
                f"{self.workers.first_rejected}"
            )

    def _last_step(self, end: AttemptEnd, rank: int) -> int | None:
        """Return the last step that a rank logged, or the step of the checkpoint that it started from."""
        step = end.ranks[rank].step
        return self.checkpoint.step if step is None and self.checkpoint else step

    def _prepare_another(self, again: Restart, *, leaving: bool) -> None:
        self.workers.end_attempt()
        self.writer.update(waiting=True)
        with self.signals.interrupting():
            self.checkpoint = newest_verified(self.writer.layout, self.recorder.warn)
        start = "from the start: there is no checkpoint yet"
        if self.checkpoint is not None:
            start = f"with the checkpoint of {self.checkpoint.description}"
        elif self.config.script is not None:  # the driver does not see state that a script has saved itself
            start = "the script starts again"
        pause = f" in {again.pause_s:g} s" if again.pause_s else ""
        self.recorder.warn(f"starting the ranks again{pause}, {start} ({again.count})")
        self.signals.pause(again.pause_s)
        self.of.replace_workers(leaving=leaving)

    def _reserved(self) -> list[RankPlace]:
        """Reserve the slots of an attempt. Raises ClusterError."""
        machine = self.of.machine
        hooks = WaitHooks(
            check=self._check_workers if self.target.foreign else None,
            worker_fault=self._worker_fault,
            last_words=self.of.cluster.last_words,
            tell=self.recorder.status,
            cluster=self.target.name,
            fixed=self.target.fixed,
        )
        with self.signals.interrupting():
            places = self.workers.reserve(request_for(self.config, machine.ranks if machine else None), hooks)
        self.display.expect(len(places), self.of.log_sizes)
        if (shows := self.of.options.shows) is not None:
            self.display.hide({place.rank for place in places if not shows(place.local_rank)})
        if machine is None:
            self.recorder.status(f"starting {counted(len(places), 'rank')} on {self.of.cluster.description}")
        return places

    def _worker_fault(self) -> str | None:
        self.signals.check()  # a run in a thread gets its signals here
        return self.of.cluster.worker_fault()

    def _check_workers(self, workers: Sequence[str]) -> None:
        """Raise ClusterError if foreign workers, or the scheduler, cannot run this."""
        check_cluster(self.client, workers)

    def _attempt(self, places: Sequence[RankPlace]) -> AttemptEnd:
        number = len(self.writer.record.attempts) + 1
        set_context(attempt=number)
        self.writer.go_on_from(self.checkpoint, self.policy)
        self.tracking.go_on_from(self.checkpoint)
        with self.signals.interrupting():  # it may copy a checkpoint, inputs and code to the hosts
            built = self.specs.build(number, places, self.checkpoint)
        self.workers.give(built, places)
        ranks = [Rank(spec, place) for spec, place in zip(built, places, strict=True)]
        logs = [self.writer.layout.log(place.rank) for place in places]
        self.recorder.event(
            "run_started",
            run_id=self.writer.run_id,
            run_dir=self.writer.layout.where,
            world_size=len(places),
            attempt=number,
            resumed_from=self.checkpoint.step if self.checkpoint else None,
        )
        record = self.writer.next_attempt(self.checkpoint, len(places))
        attempts = (*self.writer.record.attempts, record)
        self.writer.update(world_size=len(places), attempts=attempts, waiting=False)
        workers, inbox, settings = self.workers, self.of.inbox, self.config.failure
        output = RankOutput(ranks, logs, inbox, workers.fetch, workers.has)
        transfer = TransferQueue(self.writer, self.policy, inbox, output.source)
        start_timeout_s = self.config.cluster.start_timeout_s
        limits = new_watchdog(settings.hang_timeout_s, start_timeout_s), start_timeout_s, settings.lost_after_s
        attempt = Attempt(ranks, workers, output, transfer, self.recorder, *limits, now())
        try:
            return AttemptLoop(attempt, inbox, self.of.cluster.worker_fault).run()
        except BaseException:
            transfer.stop_retrying()  # a full disk or a lost run directory is a frequent reason
            raise
        finally:
            transfer.close(deadlines.CLOSE_SILENCE_S)  # the attempt itself has waited, and has reported what is missing

    def _record_end(self, end: AttemptEnd, run_end: RunEnd) -> None:
        *others, last = self.writer.record.attempts
        ranks = tuple(rank.record() for rank in end.ranks)
        failure = dataclasses.replace(run_end.failure, traceback="") if run_end.failure else None
        ended = dataclasses.replace(last, ended_at=utc_now(), outcome=str(run_end.status), ranks=ranks, failure=failure)
        self.writer.update(attempts=(*others, ended))


# --- one attempt: messages and the clock ---


_TICK_S = 0.2  # between two checks of what sends no messages: a worker's process, the connection to the scheduler
_MIN_TICK_S = 0.05  # the shortest time between two checks, while the inbox is empty
_TICK_S_PER_RANK = 0.0005  # added for each rank, because each check reads the state of all ranks
_MAX_TICK_S = 1.0
_SILENCE = 10  # times lost_after_s: a transfer that moves no byte for so long has failed
_SHOWN_AFTER_S = 3.0  # the wait for transfers, when the ranks have ended
_WHY_LOST_S = 0.1  # from the end of a worker's connection until the exit status of its process is known


class AttemptLoop:
    """Starts the ranks of an attempt and watches them until all have ended."""

    def __init__(self, attempt: Attempt, inbox: Inbox, worker_fault: Callable[[], str | None]) -> None:
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
        due = self.attempt.due()
        timeout_s = _TICK_S if due is None else min(_TICK_S, max(0.0, due - time.monotonic()))
        try:
            message = self.inbox.get(timeout=timeout_s)
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
        if at < tick_at and (due is None or at < due):
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


# --- whether another attempt follows ---


_MAX_BACKOFF_S = 60.0
# Another attempt would end the same way.
_FINAL = frozenset({FaultKind.REFUSED, FaultKind.RESULTS})


@dataclass(frozen=True, slots=True)
class Restart:
    """Another attempt follows after `pause_s`; `count` is text such as "restart 1 of 3"."""

    pause_s: float
    count: str


@dataclass(frozen=True, slots=True)
class NoRestart:
    """No other attempt follows, for `reason`; "" if the user needs no reason."""

    reason: str = ""


class RestartPolicy:
    """Counts the attempts of one command against failure.max_restarts and failure.max_losses."""

    def __init__(self, settings: FailureConfig) -> None:
        self.settings = settings
        self._restarts = self._losses = 0
        self._before: tuple[str, str, int | None] | None = None  # line, traceback and step of the last failure

    def after(self, end: AttemptEnd, step: int | None, *, scheduler_is_there: bool) -> Restart | NoRestart:
        """Return what follows an attempt; `step` is the last step that the failed rank logged."""
        if end.signum is not None or end.loss is not None or (end.fault is None and end.notice is None):
            return NoRestart()
        if self._exhausted(lost := _lost(end)):
            return NoRestart()
        if not scheduler_is_there:
            return NoRestart("the Dask scheduler has ended")
        if end.fault is not None and not lost:
            if reason := self._useless(end.fault, step):
                return NoRestart(reason)
            if not any(rank.spec.code.is_script for rank in end.ranks):  # the progress of a script is not known
                self._before = (end.fault.line, end.fault.traceback, step)
        return self._again(lost)

    def _exhausted(self, lost: bool) -> bool:
        left = self.settings.max_restarts - self._restarts
        return left <= 0 and not (lost and self._losses < self.settings.max_losses)

    def _useless(self, fault: Fault, step: int | None) -> str:
        if fault.kind in _FINAL:
            return "a restart would fail in the same way"
        same = (fault.line, fault.traceback, step) == self._before
        return "the same failure at the same step twice in a row is a mistake in the code" if same else ""

    def _again(self, lost: bool) -> Restart:
        settings = self.settings
        before = self._restarts + self._losses
        pause_s = min(_MAX_BACKOFF_S, 2.0 ** min(32, before - 1)) if before else 0.0
        if lost and self._losses < settings.max_losses:
            self._losses += 1
            return Restart(pause_s, f"loss {self._losses} of {settings.max_losses}")
        self._restarts += 1
        return Restart(pause_s, f"restart {self._restarts} of {settings.max_restarts}")


def _lost(end: AttemptEnd) -> bool:
    """Return whether the reason is a lost or preempted host or worker, and not the training code."""
    return end.notice is not None or (end.fault is not None and end.fault.kind in LOSSES)
