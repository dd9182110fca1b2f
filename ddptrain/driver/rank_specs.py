"""Builds the rank specs of an attempt."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddptrain.config.plugin_names import is_built_in, workload_target
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.tracking.setup import TrackingSetup
from ddptrain.driver.transfer.code_package import MAX_MB, CodePackage, move_code, pack, project_of, upload_code
from ddptrain.driver.transfer.inputs import RunInputs
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError
from ddptrain.protocol.exec_env import variables_of_shell
from ddptrain.protocol.rank_spec import (
    DEBUG_TIMEOUT_S,
    DIST_TIMEOUTS_S,
    Code,
    Debug,
    ProcessGroup,
    RankSpec,
    sections,
)
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint
from ddptrain.results.layout import MANIFEST
from ddptrain.results.run_record import CodeRecord
from ddptrain.results.run_writer import RunWriter

_DEBUG_ENV = {"TORCH_NCCL_ENABLE_MONITORING": "0"}  # NCCL's monitor would end ranks that wait for a debugged one
RANK_FUNCTION = "ddptrain.rank.evaluation:evaluate"


@dataclass(slots=True)
class RankSpecs:
    """Builds the specs of all ranks, and copies the files in the specs to workers that do not see them.

    tell: shows what the run waits for.
    """

    resolved: ResolvedConfig
    writer: RunWriter
    workers: Workers
    inputs: RunInputs
    tracking: TrackingSetup
    evaluation: EvaluationPlan | None
    full_traceback: bool
    debug: Debug | None
    tell: Callable[[str], None]
    package: CodePackage | None = None

    def build(self, attempt: int, places: Sequence[RankPlace], checkpoint: VerifiedCheckpoint | None) -> list[RankSpec]:
        """Return the specs in the order of `places`. A signal may interrupt it, so it imports nothing."""
        config, plan = self.resolved.config, self.evaluation
        folders = self._placed(places, checkpoint) if checkpoint is not None else [""] * len(places)
        inputs = self.inputs.place(self.workers, places)
        scored = {name: self._placed(places, each) for name, each in plan.checkpoints.items()} if plan else {}
        roots = self._code_folders(places)
        of_all, shipped = code(self.resolved), self.package
        # The worker of a local cluster has the whole environment of the shell.
        shell = {} if config.cluster.is_embedded else variables_of_shell(os.environ)
        common: dict[str, Any] = {
            "config": rank_sections(config, is_training=plan is None),
            "group": process_group(config, places, DEBUG_TIMEOUT_S if self.debug else None),
            "debug": self.debug,
            "resume_step": checkpoint.step if checkpoint is not None else 0,
            "env": {**shell, **self.tracking.env, **(_DEBUG_ENV if self.debug else {}), **config.env},
        }
        specs = []
        for place, folder, prepared, root in zip(places, folders, inputs, roots, strict=True):
            placement, own = place.placement, of_all
            if config.cluster.gpus == 0:
                placement = dataclasses.replace(placement, use_gpu=False, local_gpus=())
            if plan is not None:
                params = plan.rank_params(config.params, {name: each[place.rank] for name, each in scored.items()})
                own = dataclasses.replace(own, workload=RANK_FUNCTION, params=params)
            if root and shipped is not None:
                own = move_code(own, shipped.folder, root, shipped.archive[1])
            own = dataclasses.replace(own, inputs=prepared, full_traceback=self.full_traceback)
            tracking = self.tracking.of(place)
            spec = RankSpec(
                self.writer.run_id,
                attempt,
                place.rank,
                placement=placement,
                code=own,
                resume_from=folder,
                tracking=tracking,
                **common,
            )
            specs.append(spec)
        return specs

    def _placed(self, places: Sequence[RankPlace], checkpoint: VerifiedCheckpoint) -> list[str]:
        return self.workers.place(places, checkpoint.folder, checkpoint.files, MANIFEST, "the checkpoint")

    def _code_folders(self, places: Sequence[RankPlace]) -> list[str]:
        """Copy the project to workers that do not see its folder; return the folder of each place's copy, or ""."""
        config, nothing = self.resolved.config, [""] * len(places)
        if config.cluster.is_embedded or (config.code.folder is None and all(place.same_files for place in places)):
            return nothing
        if (project := project_of(self.resolved)) is None:
            return nothing
        package = self.package = self.package or pack(project.folder, [self.writer.layout.root.parent])
        roots = upload_code(self.workers, places, package, project.file, MAX_MB, self.tell)
        if any(roots):
            content = package.archive[1]
            self.writer.update(code=CodeRecord(content, str(package.folder), len(package.names), package.size_bytes))
        return roots


def rank_sections(config: RunConfig, *, is_training: bool = True) -> RunConfig:
    """Return the sections of the configuration as ranks get them; without `is_training` not those of training alone."""
    raw = config.model_dump(mode="json", exclude={"params", "env"})
    return sections(raw if is_training else {**raw, "profile": None, "stop_early": None})


def process_group(config: RunConfig, places: Sequence[RankPlace], timeout_s: float | None = None) -> ProcessGroup:
    """Return backend, time limit (by default that of the configuration) and address.

    Backend auto is nccl if the ranks have GPUs, else gloo.

    MIG instances use gloo, because NCCL refuses two instances of one GPU.

    Raises:
        ClusterError: the backend is auto, and some ranks have a GPU, others not.
    """
    backend = str(config.dist.backend)
    if backend == "auto":
        on_gpus = config.cluster.gpus != 0 and any(place.slot.gpu for place in places)
        without = [place.host for place in places if not place.slot.gpu] if on_gpus else []
        if without:
            raise ClusterError(
                f"only {len(places) - len(without)} of {len(places)} ranks would have a GPU (none on "
                f"{', '.join(dict.fromkeys(without))}): use only slots with a GPU (cluster.gpus: "
                f"{len(places) - len(without)}), train on the CPU (cluster.gpus: 0), or mix them (dist.backend: gloo)"
            )
        backend = "nccl" if on_gpus and not any(place.gpu.startswith("MIG-") for place in places) else "gloo"
    limit_s = timeout_s or config.dist.timeout_s or DIST_TIMEOUTS_S[backend]
    return ProcessGroup(backend, limit_s, places[0].slot.host)


def code(resolved: ResolvedConfig) -> Code:
    """Return what the ranks execute, with the paths on the driver's host.

    A built-in workload needs no module from the user's folders, which may contain for example a `pydantic.py`. It
    searches them only if the user wrote a tracker.
    """
    config = resolved.config
    script = config.script
    built_in = is_built_in(config.workload)
    needs_own_code = not built_in or any(":" in tracker.name for tracker in config.tracking.other)
    return Code(
        workload=script.description if script else workload_target(str(config.workload)),
        workdir=os.getcwd(),
        params=dict(config.params),
        script=(script.script or "") if script else "",
        module=(script.module or "") if script else "",
        args=tuple(script.args) if script else (),
        sys_path=resolved.import_folders if needs_own_code else (),
        built_in=built_in,
    )


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The checkpoints to score, by name, and the function that scores them.

    function: as module:function, called on all ranks. prepare: the function that writes the held-out data to the run's
    inputs, or "", and `request` its argument. data: a source in place of the held-out data.
    """

    function: str
    checkpoints: Mapping[str, VerifiedCheckpoint]
    prepare: str = ""
    request: Mapping[str, object] = field(default_factory=dict)
    data: str | None = None

    @property
    def description(self) -> str:
        """The names of the checkpoints, for messages."""
        return " and ".join(self.checkpoints)

    def rank_params(self, params: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of the rank's function. `folders`: where the rank finds each checkpoint."""
        targets = [
            {
                "name": name,
                "folder": folders[name],
                "step": checkpoint.step,
                "epoch": checkpoint.epoch,
                "metrics": checkpoint.metrics,
            }
            for name, checkpoint in self.checkpoints.items()
        ]
        return {"function": self.function, "targets": targets, "params": dict(params), "data": self.data}
