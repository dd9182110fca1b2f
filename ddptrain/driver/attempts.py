"""Runs the attempts of one run: after a failure, another attempt from the newest checkpoint if the policy allows it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddptrain.clusters.provider import Cluster
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver.attempt.loop import Attempt
from ddptrain.driver.attempt.rank_state import AttemptEnd
from ddptrain.driver.control.signals import Signals
from ddptrain.driver.display.run_display import RunDisplay
from ddptrain.driver.evaluation_plan import EvaluationPlan
from ddptrain.driver.failure.restart_policy import NoRestart, Restart, RestartPolicy
from ddptrain.driver.failure.run_end import RunEnd, judge_attempt
from ddptrain.driver.failure.watchdog import new_watchdog
from ddptrain.driver.rank_specs import RankSpecs
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.tracking.setup import TrackingSetup
from ddptrain.driver.transfer.inputs import RunInputs
from ddptrain.driver.transfer.transfer_queue import TransferQueue
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.log import Log, set_context
from ddptrain.results.checkpoints.retention import CheckpointPolicy
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, newest_verified
from ddptrain.results.run_record import utc_now
from ddptrain.results.run_writer import RunWriter

_CLOSE_SILENCE_S = 60.0  # after an error of the driver: for transfers that move nothing
_log = Log(__name__)


@dataclass(frozen=True, slots=True)
class RunContext:
    """The parts that all attempts of a run share. full_traceback: the ranks' logs also contain frames of libraries."""

    resolved: ResolvedConfig
    writer: RunWriter
    display: RunDisplay
    signals: Signals
    cluster: Cluster
    worker_group: WorkerGroup
    reserve: Callable[[], list[RankPlace]]
    inputs: RunInputs
    full_traceback: bool = False
    evaluation: EvaluationPlan | None = None


class AttemptSeries:
    """Runs attempts; the first one starts from `checkpoint`, or from scratch."""

    def __init__(self, context: RunContext, checkpoint: VerifiedCheckpoint | None) -> None:
        self.context = context
        self.config = context.resolved.config
        activity = "training" if context.evaluation is None else "evaluating"
        settings = self.config.checkpoint
        nan = self.config.failure.nan if context.evaluation is None else "ignore"  # a score may be NaN
        self.recorder = Recorder(context.writer, context.display, settings.metric, activity, nan)
        self.checkpoint = checkpoint
        self.policy = CheckpointPolicy(settings.keep, settings.metric, settings.mode, ignore_nan=nan == "ignore")
        self.tracking = TrackingSetup(context.resolved, context.writer, os.environ, self.recorder.notice)
        self.specs = RankSpecs(
            context.resolved,
            context.writer,
            context.worker_group,
            context.inputs,
            self.tracking,
            context.display.status,
            context.full_traceback,
            context.evaluation,
        )

    def run(self) -> RunEnd:
        """Run attempts until one ends the run; return how it ends."""
        restarts = RestartPolicy(self.config.failure)
        while True:
            end = self._attempt(self.context.reserve())
            run_end = judge_attempt(end, self.context.writer)
            self._record_end(end, run_end)
            step = self._last_step(end, end.fault.rank) if end.fault else None
            decision = restarts.after(end, step, scheduler_is_there=self.context.worker_group.connected)
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
        worker_group = self.context.worker_group
        if worker_group.rejected:
            self.recorder.warn(
                f"{worker_group.rejected} messages of workers were not valid and were ignored; the first: "
                f"{worker_group.first_rejected}"
            )

    def _last_step(self, end: AttemptEnd, rank: int) -> int | None:
        """Return the last step that a rank logged, or the step of the checkpoint that it started from."""
        step = end.ranks[rank].step
        return self.checkpoint.step if step is None and self.checkpoint else step

    def _prepare_another(self, again: Restart, *, leaving: bool) -> None:
        self.context.worker_group.end_attempt()
        self.context.writer.update(waiting=True)
        with self.context.signals.interrupting():
            self.checkpoint = newest_verified(self.context.writer.layout, self.recorder.warn)
        start = starting_point(self.checkpoint, is_script=self.context.resolved.config.script is not None)
        self.recorder.warn(f"starting the ranks again in {again.pause_s:g} s, {start} ({again.count})")
        self.context.signals.pause(again.pause_s)
        self.context.cluster.replace_workers(leaving=leaving)

    def _attempt(self, places: Sequence[RankPlace]) -> AttemptEnd:
        context = self.context
        number = len(context.writer.record.attempts) + 1
        set_context(attempt=number)
        self.tracking.go_on_from(self.checkpoint, context.writer.go_on_from(self.checkpoint, self.policy))
        with context.signals.interrupting():  # it may copy a checkpoint, inputs and code to the hosts
            built = self.specs.build(number, places, self.checkpoint)
        built = context.worker_group.sealed(built, places)
        logs = [context.writer.layout.log(place.rank) for place in places]
        specs = list(zip(built, places, logs, strict=True))
        self.recorder.event(
            "run_started",
            run_id=context.writer.run_id,
            run_dir=context.writer.layout.where,
            world_size=len(places),
            attempt=number,
            resumed_from=self.checkpoint.step if self.checkpoint else None,
        )
        record = context.writer.next_attempt(self.checkpoint, len(places))
        attempts = (*context.writer.record.attempts, record)
        context.writer.update(world_size=len(places), attempts=attempts, waiting=False)
        transfer = TransferQueue(context.writer, self.policy, context.worker_group.inbox)
        start_timeout_s = self.config.cluster.start_timeout_s
        fault = context.cluster.worker_fault
        try:
            watchdog = new_watchdog(self.config.failure.hang_timeout_s, start_timeout_s)
            parts = (transfer, self.recorder, context.worker_group.inbox, fault, watchdog, start_timeout_s)
            lost_after_s = self.config.failure.lost_after_s
            return Attempt(context.worker_group, specs, *parts, lost_after_s).run()
        except BaseException:
            transfer.stop_retrying()  # a full disk or a lost run directory is a frequent reason
            raise
        finally:
            transfer.close(_CLOSE_SILENCE_S)  # the attempt itself has waited, and has reported what is missing

    def _record_end(self, end: AttemptEnd, run_end: RunEnd) -> None:
        *others, last = self.context.writer.record.attempts
        ranks = tuple(rank.record() for rank in end.ranks)
        failure = dataclasses.replace(run_end.failure, traceback="") if run_end.failure else None
        ended = dataclasses.replace(last, ended_at=utc_now(), outcome=str(run_end.status), ranks=ranks, failure=failure)
        self.context.writer.update(attempts=(*others, ended))


def starting_point(checkpoint: VerifiedCheckpoint | None, *, is_script: bool) -> str:
    """Return the start of the next attempt as text. The driver does not see state that a script has saved itself."""
    if checkpoint is not None:
        return f"with the checkpoint of {checkpoint.description}"
    return "the script starts again" if is_script else "from the start: there is no checkpoint yet"
