"""Adds schedules to systemd or cron, and removes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ddptrain.config.wording import shorten
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import make_private, write_atomic
from ddptrain.log import Log
from ddptrain.results.run_record import utc_now
from ddptrain.schedule.entries import Entries, Entry
from ddptrain.schedule.job import MODELS_DIR, Job, read_env_file
from ddptrain.schedule.targets.cron import Cron
from ddptrain.schedule.targets.systemd import Systemd
from ddptrain.schedule.targets.target import Part, Target

_log = Log(__name__)


TargetName = Literal["systemd", "cron"]


def default_target() -> TargetName:
    """Return systemd where it runs, otherwise cron."""
    return "systemd" if Path("/run/systemd/system").is_dir() else "cron"


def make_target(name: str, *, system: bool = False) -> Target:
    """Return the scheduler; `system`: with units of the system. Raises UsageError for what it does not have."""
    if name == "systemd":
        return Systemd(system=system)
    if name != "cron":
        raise UsageError(f"a schedule is installed with systemd or cron, not with {shorten(name)}")
    if system:
        raise UsageError("--system is for --as systemd, not for cron: leave it out")
    return Cron()


def install(
    job: Job, name: TargetName, target: Target, parts: Sequence[Part], entries: Entries, *, system: bool
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
        done = _prepare_env_file(job)
        entries.save(
            _entry(job, name, parts, system=system)
        )  # first: what is installed is known, wherever this is killed
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
        target = make_target(entry.target, system=entry.system)
        target.remove(name, [Path(file) for file in entry.files])
        entries.delete(name)
    _log.info("schedule removed", schedule=name, target=entry.target)
    return entry


def _entry(job: Job, name: TargetName, parts: Sequence[Part], *, system: bool) -> Entry:
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
        system=system,
        models_dir=job.environment.get(MODELS_DIR, ""),
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
