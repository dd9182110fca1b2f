"""The attempts of one run: after a failure another one from the newest checkpoint, as the restart policy allows."""

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
from ddptrain.driver.failure.slow_ranks import SlowPolicy
from ddptrain.driver.failure.watchdog import new_watchdog
from ddptrain.driver.rank_specs import RankSpecs
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.tracking.setup import TrackingSetup
from ddptrain.driver.transfer.artifacts import ArtifactTransfer
from ddptrain.driver.transfer.inputs import RunInputs
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.log import Log, set_context
from ddptrain.results.checkpoint_verification import VerifiedCheckpoint, newest_verified
from ddptrain.results.checkpoints import CheckpointPolicy
from ddptrain.results.run_record import utc_now
from ddptrain.results.run_writer import RunWriter

_STORE_DEADLINE_S = 600.0
_log = Log(__name__)


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all attempts of a run share. full_traceback: the ranks' logs contain the frames of libraries, too."""

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

    def __init__(self, scene: RunContext, checkpoint: VerifiedCheckpoint | None) -> None:
        self.scene = scene
        self.config = scene.resolved.config
        activity = "training" if scene.evaluation is None else "evaluating"
        self.recorder = Recorder(scene.writer, scene.display, self.config.checkpoint.metric, activity)
        self.checkpoint = checkpoint
        settings = self.config.checkpoint
        self.policy = CheckpointPolicy(settings.keep, settings.metric, settings.mode)
        self.tracking = TrackingSetup(scene.resolved, scene.writer, os.environ, self.recorder.notice)
        self.specs = RankSpecs(
            scene.resolved,
            scene.writer,
            scene.worker_group,
            scene.inputs,
            self.tracking,
            scene.display.status,
            scene.full_traceback,
            scene.evaluation,
        )

    def run(self) -> RunEnd:
        """Run attempts until one ends the run; return how it ends."""
        restarts = RestartPolicy(self.config.failure)
        while True:
            end = self._attempt(self.scene.reserve())
            verdict = judge_attempt(end, self.scene.writer)
            self._record_end(end, verdict)
            step = self._reached(end, end.fault.rank) if end.fault else None
            decision = restarts.after(end, step, scheduler_is_there=self.scene.worker_group.connected)
            _log.info(
                "attempt ended",
                status=verdict.status,
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
                    return verdict
                case Restart() as again:
                    self.recorder.attempt_over(end.fault)
                    self._prepare_another(again, leaving=end.leaving)

    def _warn_of_rejected(self) -> None:
        worker_group = self.scene.worker_group
        if worker_group.rejected:
            self.recorder.warn(
                f"{worker_group.rejected} messages of workers were not valid and were ignored; the first: "
                f"{worker_group.first_rejected}"
            )

    def _reached(self, end: AttemptEnd, rank: int) -> int | None:
        """The last step that a rank logged, or the step of the checkpoint that it started from."""
        step = end.ranks[rank].step
        return self.checkpoint.step if step is None and self.checkpoint else step

    def _prepare_another(self, again: Restart, *, leaving: bool) -> None:
        self.scene.worker_group.end_attempt()
        self.scene.writer.update(waiting=True)
        self.checkpoint = newest_verified(self.scene.writer.layout, self.recorder.warn)
        start = starting_point(self.checkpoint, is_script=self.scene.resolved.config.script is not None)
        self.recorder.warn(f"starting the ranks again in {again.pause_s:g} s, {start} ({again.count})")
        self.scene.signals.pause(again.pause_s)
        self.scene.cluster.mend(leaving=leaving)

    def _attempt(self, places: Sequence[RankPlace]) -> AttemptEnd:
        scene = self.scene
        number = len(scene.writer.record.attempts) + 1
        set_context(attempt=number)
        self.tracking.go_on_from(self.checkpoint, scene.writer.go_on_from(self.checkpoint, self.policy))
        specs = [
            (spec, place, scene.writer.layout.log(place.rank))
            for spec, place in zip(self.specs.build(number, places, self.checkpoint), places, strict=True)
        ]
        self.recorder.event(
            "run_started",
            run_id=scene.writer.run_id,
            run_dir=scene.writer.layout.where,
            world_size=len(places),
            attempt=number,
            resumed_from=self.checkpoint.step if self.checkpoint else None,
        )
        record = scene.writer.next_attempt(self.checkpoint, len(places))
        attempts = (*scene.writer.record.attempts, record)
        scene.writer.update(world_size=len(places), attempts=attempts, waiting=False)
        transfer = ArtifactTransfer(
            scene.writer, self.policy, scene.worker_group.inbox, self.config.checkpoint.max_failures
        )
        start_timeout_s = self.config.cluster.start_timeout_s
        fault = scene.cluster.worker_fault
        try:
            watchdog = new_watchdog(self.config.failure.hang_timeout_s, start_timeout_s)
            parts = (transfer, self.recorder, scene.worker_group.inbox, fault, watchdog, start_timeout_s)
            lost_after_s = self.config.failure.lost_after_s
            slow = SlowPolicy(self.config.failure.slow, self.config.failure.slow_factor)
            return Attempt(scene.worker_group, specs, *parts, lost_after_s, slow).run()
        finally:
            transfer.close(_STORE_DEADLINE_S)

    def _record_end(self, end: AttemptEnd, verdict: RunEnd) -> None:
        *others, last = self.scene.writer.record.attempts
        ranks = tuple(rank.record() for rank in end.ranks)
        ended = dataclasses.replace(last, ended_at=utc_now(), outcome=str(verdict.status), ranks=ranks)
        self.scene.writer.update(attempts=(*others, ended))


def starting_point(checkpoint: VerifiedCheckpoint | None, *, is_script: bool) -> str:
    """Where the next attempt starts, for the user. A script may have saved its own state, which we don't see."""
    if checkpoint is not None:
        return f"from {checkpoint.words}"
    return "the script starts again" if is_script else "from the start: there is no checkpoint yet"
