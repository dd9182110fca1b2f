"""The attempts of one run: another one after a failure, from the last checkpoint, until there is no use in it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddptrain.clusters.provider import Cluster
from ddptrain.config.load import LoadedConfig
from ddptrain.driver.attempt import Attempt
from ddptrain.driver.control.signals import Signals
from ddptrain.driver.display import Display
from ddptrain.driver.failure import outcome as verdicts
from ddptrain.driver.failure.restart_policy import Again, Enough, Restarts
from ddptrain.driver.failure.watchdog import Watchdog
from ddptrain.driver.rank_specs import RankSpecs
from ddptrain.driver.rank_state import Outcome
from ddptrain.driver.recorder import Telling
from ddptrain.driver.tracking.setup import Tracking
from ddptrain.driver.transfer.artifacts import Porter
from ddptrain.driver.transfer.inputs import Inputs
from ddptrain.driver.worker_group import Gang, Place
from ddptrain.results.checkpoint_verification import VerifiedCheckpoint, newest_verified
from ddptrain.results.checkpoints import CheckpointPolicy
from ddptrain.results.writer import RunWriter, utc_now

_PORTER_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What all attempts of a run share."""

    loaded: LoadedConfig
    writer: RunWriter
    display: Display
    signals: Signals
    cluster: Cluster
    gang: Gang
    reserve: Callable[[], list[Place]]
    inputs: Inputs
    full_traceback: bool = False


class Series:
    """Runs attempts; `checkpoint` is what the first of them goes on from."""

    def __init__(self, scene: Scene, checkpoint: VerifiedCheckpoint | None) -> None:
        self.scene = scene
        self.config = scene.loaded.config
        self.telling = Telling(scene.writer, scene.display, self.config.checkpoint.metric)
        self.checkpoint = checkpoint
        settings = self.config.checkpoint
        self.policy = CheckpointPolicy(settings.keep, settings.metric, settings.mode)
        self.tracking = Tracking(self.config, scene.writer, os.environ, self.telling.notice)
        self.specs = RankSpecs(
            scene.loaded,
            scene.writer,
            scene.gang,
            scene.inputs,
            self.tracking,
            scene.display.status,
            scene.full_traceback,
        )

    def run(self) -> verdicts.Verdict:
        """Attempt after attempt; the verdict is that of the last one."""
        restarts = Restarts(self.config.failure)
        while True:
            outcome = self._attempt(self.scene.reserve())
            verdict = verdicts.of_outcome(outcome, self.scene.writer)
            self._record_end(outcome, verdict)
            step = self._reached(outcome, outcome.fault.rank) if outcome.fault else None
            match restarts.after(outcome, step, scheduler_is_there=self.scene.gang.connected):
                case Enough(reason):
                    if reason:
                        self.telling.warn(f"not started again: {reason}")
                    return verdict
                case Again() as again:
                    self.telling.attempt_over(outcome.fault)
                    self._prepare_another(again, leaving=outcome.leaving)

    def _reached(self, outcome: Outcome, rank: int) -> int | None:
        """The last step that a rank has logged, or else the one that it went on from."""
        step = outcome.ranks[rank].step
        return self.checkpoint.step if step is None and self.checkpoint else step

    def _prepare_another(self, again: Again, *, leaving: bool) -> None:
        self.scene.gang.end_attempt()
        self.scene.writer.update(waiting=True)
        self.checkpoint = newest_verified(self.scene.writer.layout, self.telling.warn)
        whence = f"from {self.checkpoint.words}" if self.checkpoint else "from the start: there is no checkpoint yet"
        self.telling.warn(f"starting the ranks again in {again.pause_s:g} s, {whence} ({again.count})")
        with self.scene.signals.interrupting():
            time.sleep(again.pause_s)
        self.scene.cluster.mend(leaving=leaving)

    def _attempt(self, places: Sequence[Place]) -> Outcome:
        scene = self.scene
        number = len(scene.writer.record.attempts) + 1
        self.tracking.go_on_from(self.checkpoint, scene.writer.go_on_from(self.checkpoint, self.policy))
        specs = [
            (spec, place, scene.writer.layout.log(place.rank))
            for spec, place in zip(self.specs.build(number, places, self.checkpoint), places, strict=True)
        ]
        self.telling.event(
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
        porter = Porter(scene.writer, self.policy, scene.gang.inbox, self.config.checkpoint.max_failures)
        start_timeout_s = self.config.cluster.start_timeout_s
        fault = scene.cluster.worker_fault
        try:
            watchdog = Watchdog(self.config.failure.hang_timeout_s, start_timeout_s)
            parts = (porter, self.telling, scene.gang.inbox, fault, watchdog, start_timeout_s)
            lost_after_s = self.config.failure.lost_after_s
            return Attempt(scene.gang, specs, *parts, lost_after_s).run()
        finally:
            porter.close(_PORTER_DEADLINE_S)

    def _record_end(self, outcome: Outcome, verdict: verdicts.Verdict) -> None:
        *others, last = self.scene.writer.record.attempts
        ranks = tuple(watch.record() for watch in outcome.ranks)
        ended = dataclasses.replace(last, ended_at=utc_now(), outcome=str(verdict.status), ranks=ranks)
        self.scene.writer.update(attempts=(*others, ended))
