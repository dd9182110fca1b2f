"""Runs the attempts of one run: after a failure, another attempt from the newest checkpoint if the policy allows it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddptrain.clusters.compatibility import check_cluster
from ddptrain.config.wording import counted
from ddptrain.driver.attempt import Attempt
from ddptrain.driver.attempt_loop import AttemptLoop, now
from ddptrain.driver.failure.restart_policy import NoRestart, Restart, RestartPolicy
from ddptrain.driver.failure.run_end import RunEnd, judge_attempt
from ddptrain.driver.failure.watchdog import new_watchdog
from ddptrain.driver.output import RankOutput
from ddptrain.driver.rank_specs import RankSpecs
from ddptrain.driver.ranks import AttemptEnd, Rank, RankPlace
from ddptrain.driver.reservation import WaitHooks, request_for
from ddptrain.driver.tracking.setup import TrackingSetup
from ddptrain.driver.transfer.transfer_queue import TransferQueue
from ddptrain.driver.workers import Workers
from ddptrain.log import Log, set_context
from ddptrain.protocol import deadlines
from ddptrain.results.checkpoints.retention import CheckpointPolicy
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, newest_verified
from ddptrain.results.run_record import utc_now

if TYPE_CHECKING:
    from ddptrain.driver.cluster_session import Session
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
                    if end.fault is not None and not end.fault.victim and end.fault.line not in run_end.cause:
                        self.recorder.show_cause(end.fault)  # the run ends for another reason, such as a signal
                    return run_end
                case Restart() as again:
                    self.recorder.attempt_over(end.fault)
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
        self.recorder.warn(f"starting the ranks again in {again.pause_s:g} s, {start} ({again.count})")
        self.signals.pause(again.pause_s)
        self.of.cluster.replace_workers(leaving=leaving)

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
        built = self.workers.sealed(built, places)
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
            return AttemptLoop(attempt, workers, transfer, inbox, self.of.cluster.worker_fault).run()
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
