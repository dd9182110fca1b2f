"""GitHub and GitLab: a workflow or job in the repository with the configuration, which the service starts."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddptrain import __version__
from ddptrain.errors import ExitCode, UsageError
from ddptrain.schedule.job import Job
from ddptrain.schedule.targets import target
from ddptrain.schedule.targets.target import Part, Target
from ddptrain.storage.remote_folder import is_url

_PYTHON = "3.12"
_SHORTEST_INTERVAL_S = 300
_VARIABLE = "DDPTRAIN_SCHEDULE"


@dataclass(frozen=True, slots=True)
class GitHub(Target):
    """A workflow that runs on a schedule, or by hand. runner: the label of the machines that it runs on."""

    runner: str = ""

    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """See Target."""
        if job.schedule.shortest_interval(datetime.now(UTC)).total_seconds() < _SHORTEST_INTERVAL_S:
            raise UsageError(f"--at: GitHub starts workflows every 5 minutes at most, not {job.schedule.text}")
        return _file(job, self._workflow(job), folder or _root_of(job) / ".github" / "workflows")

    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """See Target."""
        target.write_parts(parts)
        return [f"wrote {parts[0].path}: commit and push it to the default branch"]

    def notes(self, job: Job) -> list[str]:
        """See Target."""
        lost = "in a cache that GitHub deletes after 7 days without use: use s3://bucket/folder"
        notes = target.local_models_note(job, lost)
        if job.secrets:
            notes.append(f"the workflow reads these secrets of the repository: {', '.join(job.secrets)}")
        return notes + target.missing_time_note(job, "GitHub starts it right after that")

    def _workflow(self, job: Job) -> dict[str, Any]:
        timeout = {"timeout-minutes": _minutes(job.deadline_s)} if job.deadline_s else {}
        secrets = {"env": {key: f"${{{{ secrets.{key} }}}}" for key in job.secrets}} if job.secrets else {}
        return {
            "name": f"retrain {job.model}",
            "on": {"schedule": [{"cron": job.schedule.cron, "timezone": job.schedule.zone}], "workflow_dispatch": {}},
            "permissions": {"contents": "read"},
            "concurrency": {"group": f"ddptrain-{job.model}", "cancel-in-progress": False},
            "jobs": {
                "retrain": {"runs-on": self.runner or "ubuntu-latest", **timeout, **secrets, "steps": _steps(job)}
            },
        }


def _steps(job: Job) -> list[dict[str, Any]]:
    """The steps. The cache is saved also if the retraining fails, as the next one continues from its checkpoints."""
    folder = _inside(job, job.workdir)
    in_folder = {"working-directory": folder} if folder != "." else {}
    folders = _kept_folders(job)
    cache = {"path": "\n".join(folders), "key": f"ddptrain-{job.name}-${{{{ github.run_id }}}}"}
    restore = {"uses": "actions/cache/restore@v5", "with": {**cache, "restore-keys": f"ddptrain-{job.name}-"}}
    save = {"uses": "actions/cache/save@v5", "if": "always()", "with": cache}
    slot = f"${{{{ github.event_name == 'schedule' && '{job.schedule}' || '' }}}}"
    command = _retrain_line(job, '${SLOT:+--slot "$SLOT"}')
    return [
        {"uses": "actions/checkout@v6"},
        {"uses": "actions/setup-python@v6", "with": {"python-version": _PYTHON}},
        {"name": "Install", **in_folder, "run": _install_line(job)},
        *([restore] if folders else []),
        *([{"name": "Jitter", "run": target.sleep_line(job)}] if job.jitter_s else []),
        {"name": "Retrain", **in_folder, "env": {"SLOT": slot}, "run": command},
        *([save] if folders else []),
    ]


@dataclass(frozen=True, slots=True)
class GitLab(Target):
    """A file that .gitlab-ci.yml includes; a pipeline schedule of the project starts its job.

    image: of the job's container. runner: the tag of its runners.
    """

    image: str = ""
    runner: str = ""

    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """See Target."""
        return _file(job, self._jobs(job), folder or _root_of(job) / ".gitlab")

    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """See Target."""
        target.write_parts(parts)
        return [f"wrote {parts[0].path}: commit and push it"]

    def notes(self, job: Job) -> list[str]:
        """See Target."""
        create = (
            f"glab schedule create --cron '{job.schedule.cron}' --cronTimeZone {job.schedule.zone} --ref main "
            f"--variable {_VARIABLE}:{job.name} --description {shlex.quote(job.title)}"
        )
        notes = [
            f"add to .gitlab-ci.yml: include: [{{local: .gitlab/ddptrain-{job.name}.yml}}]",
            f"create the schedule: {create}",
            *target.local_models_note(job, "which is in a cache that a runner may delete: use s3://bucket/folder"),
        ]
        if job.secrets:
            notes.append(f"the job reads these masked CI/CD variables of the project: {', '.join(job.secrets)}")
        return notes + target.missing_time_note(job, "GitLab may skip this time")

    def _jobs(self, job: Job) -> dict[str, Any]:
        folder = _inside(job, job.workdir)
        folders = _kept_folders(job)
        cache = {"cache": {"key": f"ddptrain-{job.name}", "paths": folders, "when": "always"}} if folders else {}
        timeout = {"timeout": f"{_minutes(job.deadline_s)} minutes"} if job.deadline_s else {}
        return {
            f"retrain {job.name}": {
                "image": self.image or f"python:{_PYTHON}",
                "rules": [{"if": f'$CI_PIPELINE_SOURCE == "schedule" && ${_VARIABLE} == "{job.name}"'}],
                "resource_group": f"ddptrain-{job.model}",
                "interruptible": False,
                **timeout,
                **({"tags": [self.runner]} if self.runner else {}),
                **cache,
                "script": [
                    *([f"cd {shlex.quote(folder)}"] if folder != "." else []),
                    *([] if self.image else [_install_line(job)]),
                    *([target.sleep_line(job)] if job.jitter_s else []),
                    _retrain_line(job, f"--slot {shlex.quote(str(job.schedule))}"),
                ],
                "allow_failure": {"exit_codes": [int(ExitCode.DEADLINE)]},
                "retry": {
                    "max": 2,
                    "when": ["runner_system_failure", "stuck_or_timeout_failure"],
                    "exit_codes": [int(ExitCode.PREEMPTED)],
                },
            }
        }


def _file(job: Job, content: dict[str, Any], folder: Path) -> list[Part]:
    name = f"ddptrain-{job.name}.yml"
    return [Part(name, target.yaml_text(job, content), folder / name)]


def _minutes(deadline_s: float) -> int:
    """Return the time limit of the job: the deadline of the retraining, and ten minutes."""
    return math.ceil((deadline_s + 600) / 60)


def _root_of(job: Job) -> Path:
    """Return the folder of the repository with the configuration. Raises UsageError if there is none."""
    for folder in job.config.parents:
        if (folder / ".git").exists():
            return folder
    raise UsageError(f"{job.config} is in no git repository, where a workflow could find it: commit it to one first")


def _inside(job: Job, path: Path) -> str:
    """Return a path relative to the repository. Raises UsageError if it is elsewhere."""
    root = _root_of(job)
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise UsageError(f"{path} is not in the repository {root}: run the command in a folder of it") from None


def _install_line(job: Job) -> str:
    """Return the shell command that installs ddptrain and the requirements of the repository."""
    requirements = " -r requirements.txt" if (job.workdir / "requirements.txt").is_file() else ""
    return f"pip install ddptrain=={__version__}{requirements}"


def _kept_folders(job: Job) -> list[str]:
    """Return the folders that the next start needs, relative to the repository: the registry and the runs."""
    folders = [place for place in (job.models_dir, job.runs_dir) if not is_url(place)]
    return [_inside(job, job.workdir / folder) for folder in folders]


def _retrain_line(job: Job, slot: str) -> str:
    """Return the shell command; slot: its option --slot, as shell text."""
    config = os.path.relpath(job.config.resolve(), job.workdir.resolve())
    return f"ddptrain retrain {shlex.quote(config)} {slot}"
