"""The attempts of one run: another one after a failure, from the last checkpoint, until there is no use in it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.clusters.provider import Cluster
from ddptrain.config.load import LoadedConfig, search_folders
from ddptrain.config.models import RunConfig
from ddptrain.config.registry import is_built_in, workload_target
from ddptrain.driver.attempt import Attempt
from ddptrain.driver.control.signals import Signals
from ddptrain.driver.display import Display
from ddptrain.driver.failure import outcome as verdicts
from ddptrain.driver.failure.restart_policy import Again, Enough, Restarts
from ddptrain.driver.failure.watchdog import Watchdog, alive_s
from ddptrain.driver.rank_state import Outcome
from ddptrain.driver.recorder import Telling
from ddptrain.driver.tracking.setup import Tracking
from ddptrain.driver.transfer.artifacts import Porter
from ddptrain.driver.transfer.code_package import pack, project_of
from ddptrain.driver.transfer.code_upload import check_imports, ship
from ddptrain.driver.transfer.inputs import Inputs
from ddptrain.driver.worker_group import Gang, Place
from ddptrain.protocol.code_digest import moved
from ddptrain.protocol.rank_spec import DIST_TIMEOUTS_S, RankSpec
from ddptrain.results.checkpoint_verification import VerifiedCheckpoint, newest_verified
from ddptrain.results.checkpoints import MANIFEST, CheckpointPolicy
from ddptrain.results.record import CodeRecord
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
            for spec, place in zip(self._specs(number, places), places, strict=True)
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

    def _specs(self, number: int, places: Sequence[Place]) -> list[RankSpec]:
        resume_from = [""] * len(places)
        if self.checkpoint is not None:
            files = self.checkpoint.files
            resume_from = self.scene.gang.place(places, self.checkpoint.folder, files, MANIFEST, "the checkpoint")
        inputs = self.scene.inputs.place(self.scene.gang, places)
        specs = [
            dataclasses.replace(self._spec(number, place, places), resume_from=checkpoint, inputs=folder)
            for place, checkpoint, folder in zip(places, resume_from, inputs, strict=True)
        ]
        if not self.config.cluster.is_embedded:
            specs = self._with_code(specs, places)
        return self.scene.gang.sealed(specs, places)

    def _with_code(self, specs: list[RankSpec], places: Sequence[Place]) -> list[RankSpec]:
        """The same where workers see the project's folder; for others, with the places to which its code was taken."""
        project = project_of(self.scene.loaded, search_path(self.scene.loaded))
        if project is None:
            return specs
        package = pack(project.folder, [self.scene.writer.layout.root.parent])
        tell = self.scene.display.status
        shipped = ship(self.scene.gang, places, package, project.file, self.config.code.max_mb, tell)
        if not any(shipped.roots):
            return specs
        size = len(package.names), package.size_bytes
        self.scene.writer.update(code=CodeRecord(shipped.code, str(package.folder), *size))
        there = [
            dataclasses.replace(
                spec,
                code=shipped.code if root else "",
                workdir=moved(spec.workdir, package.folder, root),
                script=moved(spec.script, package.folder, root) if os.path.isabs(spec.script) else spec.script,
                sys_path=tuple(moved(entry, package.folder, root) for entry in spec.sys_path),
            )
            for spec, root in zip(specs, shipped.roots, strict=True)
        ]
        check_imports(self.scene.gang, places, project.file, [spec.sys_path for spec in there])
        return there

    def _spec(self, number: int, place: Place, places: Sequence[Place]) -> RankSpec:
        config, backend = self.config, self._dist_backend(places)
        return RankSpec(
            run_id=self.scene.writer.run_id,
            attempt=number,
            rank=place.rank,
            world_size=len(places),
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
            slot=place.slot.index,
            **_workload(config),
            hosts=len({other.slot.host for other in places}),
            local_gpus=_gpus_beside(place, places) if config.cluster.gpus != 0 else (),
            alive_s=alive_s(config.failure.hang_timeout_s, config.failure.lost_after_s),
            full_traceback=self.scene.full_traceback,
            params=dict(config.params),
            dist_backend=backend,
            dist_timeout_s=config.dist.timeout_s or DIST_TIMEOUTS_S[backend],
            grace_s=config.failure.grace_s,
            every_epochs=config.checkpoint.every_epochs,
            every_steps=config.checkpoint.every_steps,
            every_s=config.checkpoint.every_s,
            asynchronous=config.checkpoint.asynchronous,
            prepare=config.prepare.model_dump(),
            max_failures=config.checkpoint.max_failures,
            max_restarts=config.failure.max_restarts,
            workdir=os.getcwd(),
            **_import_path(self.scene.loaded),
            master_addr=places[0].slot.host,
            shared=place.shared,
            use_gpu=config.cluster.gpus != 0,
            env={**self.tracking.env, **config.env},
            tracking=self.tracking.of(place),
        )

    def _dist_backend(self, places: Sequence[Place]) -> str:
        chosen = self.config.dist.backend
        if chosen != "auto":
            return chosen
        on_gpus = self.config.cluster.gpus != 0 and all(place.slot.gpu for place in places)
        return "nccl" if on_gpus else "gloo"


def _workload(config: RunConfig) -> dict[str, Any]:
    """What the ranks run, as fields of their specs."""
    script = config.script
    if script is None:
        return {"workload": workload_target(str(config.workload))}
    return {
        "workload": script.words,
        "script": script.script or "",
        "module": script.module or "",
        "args": tuple(script.args),
        "local_rank_arg": script.local_rank_arg,
    }


def _gpus_beside(place: Place, places: Sequence[Place]) -> tuple[str, ...]:
    """The devices of all ranks on a place's host, in the order of their local ranks; none where one has none."""
    beside = sorted((each for each in places if each.slot.host == place.slot.host), key=lambda each: each.local_rank)
    return tuple(each.gpu for each in beside) if all(each.gpu for each in beside) else ()


def _import_path(loaded: LoadedConfig) -> dict[str, Any]:
    """Where ranks look for modules besides where all programs do, as fields of their specs.

    A built-in workload needs nothing of the user's folders, where anybody may have put a `pydantic.py`.
    """
    if not is_built_in(loaded.config.workload):
        return {"sys_path": search_path(loaded)}
    own_trackers = any(":" in tracker.name for tracker in loaded.config.tracking.other)
    return {"built_in": True, "sys_path": search_path(loaded) if own_trackers else ()}


def search_path(loaded: LoadedConfig) -> tuple[str, ...]:
    """Where a workload's module is looked for first: beside the YAML file, then in the working directory."""
    return search_folders(Path(loaded.path))
