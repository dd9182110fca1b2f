"""GitLab: a job that a pipeline schedule of the project starts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import ExitCode
from ddptrain.schedule.job import Job
from ddptrain.schedule.targets.repository import PYTHON, inside, install_line, kept_folders, retrain_line, root_of
from ddptrain.schedule.targets.target import (
    Part,
    Target,
    delete_files,
    local_models_note,
    missing_time_note,
    sleep_line,
    write_parts,
    yaml_text,
)

_VARIABLE = "DDPTRAIN_SCHEDULE"


@dataclass(frozen=True, slots=True)
class GitLab(Target):
    """A file that .gitlab-ci.yml includes. image: of the job's container. runner: the tag of its runners."""

    image: str = ""
    runner: str = ""

    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """See Target."""
        name = f"ddptrain-{job.name}.yml"
        where = folder or root_of(job) / ".gitlab"
        return [Part(name, yaml_text(job, self._jobs(job)), where / name)]

    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """See Target."""
        write_parts(parts)
        return [f"wrote {parts[0].path}: commit and push it"]

    def remove(self, name: str, files: Sequence[Path]) -> None:
        """See Target."""
        delete_files(files)

    def notes(self, job: Job) -> list[str]:
        """See Target."""
        create = (
            f"glab schedule create --cron '{job.schedule.cron}' --cronTimeZone {job.schedule.zone} --ref main "
            f"--variable {_VARIABLE}:{job.name} --description {shlex.quote(job.title)}"
        )
        notes = [
            f"add to .gitlab-ci.yml: include: [{{local: .gitlab/ddptrain-{job.name}.yml}}]",
            f"create the schedule: {create}",
            *local_models_note(job, "which is in a cache that a runner may delete: use s3://bucket/folder"),
        ]
        if job.secrets:
            notes.append(f"the job reads these masked CI/CD variables of the project: {', '.join(job.secrets)}")
        return notes + missing_time_note(job, "GitLab may skip this time")

    def _jobs(self, job: Job) -> dict[str, Any]:
        folder = inside(job, job.workdir)
        folders = kept_folders(job)
        cache = {"cache": {"key": f"ddptrain-{job.name}", "paths": folders, "when": "always"}} if folders else {}
        timeout = {"timeout": f"{math.ceil((job.deadline_s + 600) / 60)} minutes"} if job.deadline_s else {}
        return {
            f"retrain {job.name}": {
                "image": self.image or f"python:{PYTHON}",
                "rules": [{"if": f'$CI_PIPELINE_SOURCE == "schedule" && ${_VARIABLE} == "{job.name}"'}],
                "resource_group": f"ddptrain-{job.model}",
                "interruptible": False,
                **timeout,
                **({"tags": [self.runner]} if self.runner else {}),
                **cache,
                "script": [
                    *([f"cd {shlex.quote(folder)}"] if folder != "." else []),
                    *([] if self.image else [install_line(job)]),
                    *([sleep_line(job)] if job.jitter_s else []),
                    retrain_line(job, f"--slot {shlex.quote(str(job.schedule))}"),
                ],
                "allow_failure": {"exit_codes": [int(ExitCode.DEADLINE)]},
                "retry": {
                    "max": 2,
                    "when": ["runner_system_failure", "stuck_or_timeout_failure"],
                    "exit_codes": [int(ExitCode.PREEMPTED)],
                },
            }
        }
