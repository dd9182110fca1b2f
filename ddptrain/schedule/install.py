"""Adds schedules to a scheduler of this machine, a cluster or a repository, and removes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import make_private, write_atomic
from ddptrain.log import Log
from ddptrain.results.run_record import utc_now
from ddptrain.schedule.entries import Entries, Entry
from ddptrain.schedule.job import MODELS_DIR, Job, read_env_file
from ddptrain.schedule.target_name import TargetName
from ddptrain.schedule.targets.cron import Cron
from ddptrain.schedule.targets.kubernetes import Kubernetes
from ddptrain.schedule.targets.repository import GitHub, GitLab
from ddptrain.schedule.targets.systemd import Systemd
from ddptrain.schedule.targets.target import Part, Target

_log = Log(__name__)


_ON_THIS_HOST = (TargetName.SYSTEMD, TargetName.CRON)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The options of single schedulers; each is "" or False where it is not given."""

    image: str = ""
    namespace: str = ""
    claim: str = ""
    runner: str = ""
    system: bool = False


_OPTIONS = {
    "image": (TargetName.KUBERNETES, TargetName.GITLAB),
    "namespace": (TargetName.KUBERNETES,),
    "claim": (TargetName.KUBERNETES,),
    "runner": (TargetName.GITHUB, TargetName.GITLAB),
    "system": (TargetName.SYSTEMD,),
}


def default_target() -> TargetName:
    """Return systemd where it runs, otherwise cron."""
    return TargetName.SYSTEMD if Path("/run/systemd/system").is_dir() else TargetName.CRON


def make_target(name: TargetName, options: TargetOptions) -> Target:
    """Return the scheduler. Raises UsageError for an option that it does not have."""
    for option, targets in _OPTIONS.items():
        if getattr(options, option) and name not in targets:
            raise UsageError(f"--{option} is for --as {' or '.join(targets)}, not for {name}: leave it out")
    match name:
        case TargetName.SYSTEMD:
            return Systemd(system=options.system)
        case TargetName.CRON:
            return Cron()
        case TargetName.KUBERNETES:
            return Kubernetes(options.image, options.namespace, options.claim)
        case TargetName.GITHUB:
            return GitHub(options.runner)
        case TargetName.GITLAB:
            return GitLab(options.image, options.runner)


def install(
    job: Job, name: TargetName, target: Target, parts: Sequence[Part], options: TargetOptions, entries: Entries
) -> list[str]:
    """Install a schedule and record it; a schedule of the same name, configuration and scheduler is replaced.

    Returns what was done, in lines. Raises UsageError, ClusterError.
    """
    with entries.locked("install"):
        before = next((entry for entry in entries.all() if entry.name == job.name), None)
        if before and (before.config, before.target) != (str(job.config), str(name)):
            raise UsageError(
                f"there is a schedule {job.name} already, of {before.config} with {before.target}: choose another "
                f"--name, or ddptrain schedule remove {job.name}"
            )
        done = _prepare_env_file(job) if name in _ON_THIS_HOST else []
        entries.save(_entry(job, name, parts, options))  # first: what is installed is known, wherever this is killed
        try:
            done += target.install(job, parts)
        except (UsageError, ClusterError):
            if before:
                entries.save(before)
            else:
                entries.delete(job.name)
            raise
    _log.info("schedule installed", schedule=job.name, target=name)
    return done


def uninstall(name: str, entries: Entries) -> Entry:
    """Remove a schedule from its scheduler, then its record. Raises UsageError, ClusterError: the record stays."""
    with entries.locked("install"):
        entry = entries.find(name)
        options = TargetOptions(namespace=entry.namespace, system=entry.system)
        target = make_target(TargetName(entry.target), options)
        target.remove(name, [Path(file) for file in entry.files])
        entries.delete(name)
    _log.info("schedule removed", schedule=name, target=entry.target)
    return entry


def _entry(job: Job, name: TargetName, parts: Sequence[Part], options: TargetOptions) -> Entry:
    return Entry(
        name=job.name,
        model=job.model,
        config=str(job.config),
        workdir=str(job.workdir),
        at=job.schedule.text,
        zone=job.schedule.zone,
        target=name,
        added_at=utc_now(),
        jitter_s=job.jitter_s,
        files=tuple(str(part.path) for part in parts if part.path),
        namespace=options.namespace,
        system=options.system,
        models_dir=job.environment.get(MODELS_DIR, "") if name in _ON_THIS_HOST else "",
    )


def _prepare_env_file(job: Job) -> list[str]:
    """Create the file for the secret variables, with mode 600 and without values. Raises UsageError."""
    given = read_env_file(job.env_file)
    missing = [name for name in job.secrets if not given.get(name)]
    if not missing:
        return []
    if not os.path.lexists(job.env_file):
        lines = [f"# Secret variables of {job.title}", *(f"# {name}=" for name in missing), ""]
        try:
            make_private(job.env_file.parent)
            write_atomic(job.env_file, "\n".join(lines).encode(), mode=0o600)
        except OSError as error:
            raise UsageError(f"cannot write {job.env_file}: {error.strerror}") from error
    return [f"write the values of {', '.join(missing)} into {job.env_file}"]
