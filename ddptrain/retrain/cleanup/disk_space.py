"""Checks before a training that there is as much free disk space as the last run used."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError
from ddptrain.log import Log
from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.results.lookup import RunView, list_runs
from ddptrain.results.prune import PrunePolicy, folder_bytes, prune
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_store import LocalRuns
from ddptrain.results.secure_files import is_own_folder
from ddptrain.results.show.render import size
from ddptrain.retrain.cleanup.clean_up import protected_runs
from ddptrain.storage.remote_folder import is_url

_log = Log(__name__)


@dataclass(frozen=True, slots=True)
class _Need:
    """Bytes that a training will probably write below a folder, and why."""

    folder: Path
    required_bytes: int
    reason: str


def check_space(
    runs_dir: str,
    name: str,
    models_dir: str,
    model: str = "",
    policy: PrunePolicy | None = None,
    resumed: str | None = None,
) -> None:
    """Check that the file systems have space for a run as large as the last one of this name, and for a new version.

    model: the model that gets the version. policy: what `results prune` keeps, for the message; None: its defaults.
    resumed: the id of the run that continues; what it uses already is not needed again.

    Does nothing for object stores, and for a first run. Quotas of users are not seen.

    Raises:
        ClusterError: there is not enough space; the message says how much `results prune` would free.
        StoreError, RegistryDamaged: the registry cannot be read.
    """
    needs = [] if is_url(runs_dir) else _needs_of_run(Path(runs_dir), name, resumed)
    if model and not is_url(models_dir):
        needs += _needs_of_version(models_dir, model)
    by_device: dict[int, list[_Need]] = {}
    for need in needs:
        by_device.setdefault(os.stat(need.folder).st_dev, []).append(need)
    for same in by_device.values():
        free_bytes = shutil.disk_usage(same[0].folder).free
        required_bytes = sum(need.required_bytes for need in same)
        _log.info("disk space", folder=same[0].folder, free=free_bytes, required=required_bytes)
        if free_bytes < required_bytes:
            reasons = ", and ".join(need.reason for need in same)
            raise ClusterError(
                f"not enough disk space in {same[0].folder}: {size(free_bytes)} are free, but {reasons}; "
                f"{_advice(runs_dir, models_dir, policy or PrunePolicy())}"
            )


def _needs_of_run(runs_dir: Path, name: str, resumed: str | None) -> list[_Need]:
    views = [view for view in list_runs(runs_dir) if view.record.name == name and is_own_folder(view.layout.root)]
    last = _last_complete([view for view in views if view.layout.root.name != resumed])
    if last is None:
        return []
    used_bytes = folder_bytes(last.layout.root)
    reason = f"the last run, {last.run_id}, used {size(used_bytes)}"
    present_bytes = folder_bytes(runs_dir / resumed) if resumed else 0
    if present_bytes:
        reason += f" (run {resumed}, which continues, has {size(present_bytes)} of it)"
    return [_Need(runs_dir, max(0, used_bytes - present_bytes), reason)]


def _last_complete(views: list[RunView]) -> RunView | None:
    """Return the newest run that succeeded; if there is none, the newest that has ended. `views`: newest first."""
    succeeded = [view for view in views if view.status == RunStatus.SUCCEEDED]
    ended = [view for view in views if not view.is_running and not view.problem]
    return next(iter(succeeded or ended), None)


def _needs_of_version(models_dir: str, model: str) -> list[_Need]:
    versions = ModelReader.open(models_dir).versions(model)
    if not versions:
        return []
    last = versions[-1]
    reason = f"version {last.version} of {model} has {size(last.size_bytes)}"
    return [_Need(Path(models_dir).expanduser(), last.size_bytes, reason)]


def _advice(runs_dir: str, models_dir: str, policy: PrunePolicy) -> str:
    """Return what `results prune` would free, and the command."""
    if is_url(runs_dir):
        return "delete other files, or choose another folder"
    command = f"ddptrain results prune --keep {policy.keep} --failed-keep {policy.failed_keep}"
    if policy.name is not None:
        command += f" --name {policy.name}"
    if runs_dir != "runs":
        command += f" --runs-dir {shlex.quote(runs_dir)}"
    if models_dir != "models":
        command += f" --models-dir {shlex.quote(models_dir)}"
    protected = protected_runs(ModelReader.open(models_dir))
    report = prune(LocalRuns(Path(runs_dir)), policy, protected, dry_run=True)
    if not report.freed_bytes:
        return f"`{command}` would free nothing: keep fewer runs, delete other files, or choose another results.dir"
    return f"`{command}` frees {size(report.freed_bytes)} ({counted(len(report.removed), 'run')})"
