"""Builds the rank specs of an attempt."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddptrain.config.plugin_names import is_built_in, workload_target
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.tracking.setup import TrackingSetup
from ddptrain.driver.transfer.code_package import CodePackage, pack, project_of
from ddptrain.driver.transfer.inputs import RunInputs
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError
from ddptrain.file_ops import temp_folder
from ddptrain.protocol.code_digest import inode_digest, move_path
from ddptrain.protocol.exec_env import variables_of_shell
from ddptrain.protocol.rank_spec import (
    DIST_TIMEOUTS_S,
    Code,
    Placement,
    ProcessGroup,
    RankSpec,
    sections,
)
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint
from ddptrain.results.layout import MANIFEST
from ddptrain.results.run_record import CodeRecord
from ddptrain.results.run_writer import RunWriter
from ddptrain.worker import driver_calls

_ARCHIVE, _HASH = "code.tar.gz", "hash"  # the files of a copy of the code
_MOST_CODE_MB = 200.0  # that are sent to workers which do not see the project
RANK_FUNCTION = "ddptrain.rank.evaluation:evaluate"


@dataclass(slots=True)
class RankSpecs:
    """Builds the specs of all ranks, and copies the files in the specs to workers that do not see them.

    All attempts use the code that was packed for the first one. tell: shows what the run waits for.
    """

    resolved: ResolvedConfig
    writer: RunWriter
    workers: Workers
    inputs: RunInputs
    tracking: TrackingSetup
    evaluation: EvaluationPlan | None
    full_traceback: bool
    tell: Callable[[str], None]
    package: CodePackage | None = None

    def build(self, attempt: int, places: Sequence[RankPlace], checkpoint: VerifiedCheckpoint | None) -> list[RankSpec]:
        """Return the specs in the order of `places`. A signal may interrupt it, so it imports nothing."""
        folders = [""] * len(places)
        resume_step = 0
        if checkpoint is not None:
            resume_step = checkpoint.step
            folders = self.workers.place(places, checkpoint.folder, checkpoint.files, MANIFEST, "the checkpoint")
        inputs = self.inputs.place(self.workers, places)
        placements = all_placements(places, use_gpu=self.resolved.config.cluster.gpus != 0)
        template = self._template(attempt, places, placements[0], resume_step)
        specs = [
            dataclasses.replace(
                template,
                rank=place.rank,
                placement=placement,
                resume_from=folder,
                code=dataclasses.replace(template.code, inputs=prepared),
                tracking=self.tracking.of(place),
            )
            for place, placement, folder, prepared in zip(places, placements, folders, inputs, strict=True)
        ]
        if self.evaluation is not None:
            specs = self._with_checkpoints(specs, places, self.evaluation)
        if not self.resolved.config.cluster.is_embedded:
            specs = self._with_code(specs, places)
        return specs

    def _template(self, attempt: int, places: Sequence[RankPlace], placement: Placement, resume_step: int) -> RankSpec:
        """Return a spec with the fields that are equal for all ranks."""
        config = self.resolved.config
        # The worker of a local cluster has the whole environment of the shell.
        shell = {} if config.cluster.is_embedded else variables_of_shell(os.environ)
        return RankSpec(
            run_id=self.writer.run_id,
            attempt=attempt,
            rank=0,
            config=rank_sections(config, profile=self.evaluation is None),
            placement=placement,
            group=process_group(config, places),
            resume_step=resume_step,
            code=dataclasses.replace(code(self.resolved), full_traceback=self.full_traceback),
            env={**shell, **self.tracking.env, **config.env},
        )

    def _with_checkpoints(
        self, specs: list[RankSpec], places: Sequence[RankPlace], plan: EvaluationPlan
    ) -> list[RankSpec]:
        """Copy the checkpoints of `plan` to the workers if necessary; return the specs of ranks that score them."""
        folders = {
            name: self.workers.place(places, checkpoint.folder, checkpoint.files, MANIFEST, "the checkpoint")
            for name, checkpoint in plan.checkpoints.items()
        }
        params = self.resolved.config.params
        changed = []
        for index, spec in enumerate(specs):
            own = plan.rank_params(params, {name: each[index] for name, each in folders.items()})
            code = dataclasses.replace(spec.code, workload=RANK_FUNCTION, params=own)
            changed.append(dataclasses.replace(spec, code=code))
        return changed

    def _with_code(self, specs: list[RankSpec], places: Sequence[RankPlace]) -> list[RankSpec]:
        """Copy the project to workers that do not see its folder; return the specs with the paths of the copies."""
        if self.resolved.config.code.folder is None and all(place.same_files for place in places):
            return specs
        project = project_of(self.resolved)
        if project is None:
            return specs
        package = self.package = self.package or pack(project.folder, [self.writer.layout.root.parent])
        roots = upload_code(self.workers, places, package, project.file, _MOST_CODE_MB, self.tell)
        if not any(roots):
            return specs
        code = package.archive[1]
        self.writer.update(code=CodeRecord(code, str(package.folder), len(package.names), package.size_bytes))
        return [
            dataclasses.replace(spec, code=move_code(spec.code, package.folder, root, code)) if root else spec
            for spec, root in zip(specs, roots, strict=True)
        ]


def rank_sections(config: RunConfig, *, profile: bool = True) -> SimpleNamespace:
    """Return the sections of the configuration as ranks get them. `profile`: whether the ranks record what it says."""
    raw = config.model_dump(mode="json", exclude={"params", "env"})
    return sections(raw if profile else {**raw, "profile": None})


def all_placements(places: Sequence[RankPlace], *, use_gpu: bool) -> list[Placement]:
    """Return the placement of each rank in the run."""
    by_host: dict[str, list[RankPlace]] = {}
    for place in places:
        by_host.setdefault(place.slot.host, []).append(place)
    gpus = {host: _gpus_of_host(of_host) if use_gpu else () for host, of_host in by_host.items()}
    return [
        Placement(
            world_size=len(places),
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
            slot=place.slot.index,
            hosts=len(by_host),
            local_gpus=gpus[place.slot.host],
            use_gpu=use_gpu,
            shared=place.shared,
        )
        for place in places
    ]


def _gpus_of_host(of_host: Sequence[RankPlace]) -> tuple[str, ...]:
    """Return the devices of all ranks of a host in the order of their local ranks; empty if a rank has none."""
    ranks = sorted(of_host, key=lambda each: each.local_rank)
    return tuple(each.gpu for each in ranks) if all(each.gpu for each in ranks) else ()


def process_group(config: RunConfig, places: Sequence[RankPlace]) -> ProcessGroup:
    """Return backend, time limit and address. Backend auto is nccl if the ranks have GPUs, else gloo.

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
    return ProcessGroup(backend, config.dist.timeout_s or DIST_TIMEOUTS_S[backend], places[0].slot.host)


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


def move_code(code: Code, project: Path, root: str, content_hash: str) -> Code:
    """Return `code` with all paths below `project` replaced by those in the copy `root`."""
    return dataclasses.replace(
        code,
        content_hash=content_hash,
        workdir=move_path(code.workdir, project, root),
        script=move_path(code.script, project, root) if os.path.isabs(code.script) else code.script,
        sys_path=tuple(move_path(entry, project, root) for entry in code.sys_path),
    )


# --- the code of the project on workers that do not see its folder: one copy for each host ---


def upload_code(
    workers: Workers,
    places: Sequence[RankPlace],
    package: CodePackage,
    needed: Path,
    max_mb: float,
    tell: Callable[[str], None],
) -> list[str]:
    """Return, for each place, the folder of the project's copy on its host; "" if its worker sees the project itself.

    Raises ClusterError if the upload fails; UsageError if the code exceeds `max_mb`, or lacks the file `needed`.
    """
    host_of = {place.slot.worker: place.hostname for place in places}
    folders = dict.fromkeys(host_of, "")
    try:
        seen = {}
        if package.sample:  # an empty one cannot identify the folder
            digest = inode_digest(package.folder, package.sample)
            seen = workers.ask([*host_of], driver_calls.sees_code, str(package.folder), package.sample, digest)
        if lacking := {worker: host for worker, host in host_of.items() if not seen.get(worker)}:
            package.check(needed, max_mb)
            archive, code = package.archive
            hosts = ", ".join(dict.fromkeys(lacking.values()))
            tell(f"uploading {len(package.names)} files of {package.folder} to host {hosts}")
            with temp_folder("ddptrain-code-") as folder:
                (folder / "code").mkdir()
                (folder / "code" / _ARCHIVE).write_bytes(archive)
                (folder / "code" / _HASH).write_text(code)
                copies = workers.copy(lacking, folder / "code", (_ARCHIVE, _HASH), _HASH)
            for copy in set(copies.values()):
                having = [worker for worker in copies if copies[worker] == copy]
                folders |= workers.ask(having, driver_calls.unpack_code, f"{copy}/{_ARCHIVE}", code)
    except (ClusterError, OSError) as error:
        raise ClusterError(f"could not upload the code: {error}") from error
    return [folders[place.slot.worker] for place in places]


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
