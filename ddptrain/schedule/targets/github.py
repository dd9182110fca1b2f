"""GitHub: a workflow that runs on a schedule, or by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddptrain.errors import UsageError
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

_SHORTEST_INTERVAL_S = 300


@dataclass(frozen=True, slots=True)
class GitHub(Target):
    """A workflow of the repository with the configuration. runner: the label of the machines that it runs on."""

    runner: str = ""

    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """See Target."""
        if job.schedule.shortest_interval(datetime.now(UTC)).total_seconds() < _SHORTEST_INTERVAL_S:
            raise UsageError(f"--at: GitHub starts workflows every 5 minutes at most, not {job.schedule.text}")
        name = f"ddptrain-{job.name}.yml"
        where = folder or root_of(job) / ".github" / "workflows"
        return [Part(name, yaml_text(job, self._workflow(job)), where / name)]

    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """See Target."""
        write_parts(parts)
        return [f"wrote {parts[0].path}: commit and push it to the default branch"]

    def remove(self, name: str, files: Sequence[Path]) -> None:
        """See Target."""
        delete_files(files)

    def notes(self, job: Job) -> list[str]:
        """See Target."""
        notes = local_models_note(
            job, "in a cache that GitHub deletes after 7 days without use: use s3://bucket/folder"
        )
        if job.secrets:
            notes.append(f"the workflow reads these secrets of the repository: {', '.join(job.secrets)}")
        return notes + missing_time_note(job, "GitHub starts it right after that")

    def _workflow(self, job: Job) -> dict[str, Any]:
        timeout = {"timeout-minutes": math.ceil((job.deadline_s + 600) / 60)} if job.deadline_s else {}
        secrets = {"env": {key: f"${{{{ secrets.{key} }}}}" for key in job.secrets}} if job.secrets else {}
        return {
            "name": f"retrain {job.model}",
            "on": {
                "schedule": [{"cron": job.schedule.cron, "timezone": job.schedule.zone}],
                "workflow_dispatch": {},
            },
            "permissions": {"contents": "read"},
            "concurrency": {"group": f"ddptrain-{job.model}", "cancel-in-progress": False},
            "jobs": {
                "retrain": {"runs-on": self.runner or "ubuntu-latest", **timeout, **secrets, "steps": _steps(job)}
            },
        }


def _steps(job: Job) -> list[dict[str, Any]]:
    """The steps. The cache is saved also if the retraining fails, as the next one continues from its checkpoints."""
    folder = inside(job, job.workdir)
    in_folder = {"working-directory": folder} if folder != "." else {}
    folders = kept_folders(job)
    cache = {"path": "\n".join(folders), "key": f"ddptrain-{job.name}-${{{{ github.run_id }}}}"}
    restore = {"uses": "actions/cache/restore@v5", "with": {**cache, "restore-keys": f"ddptrain-{job.name}-"}}
    save = {"uses": "actions/cache/save@v5", "if": "always()", "with": cache}
    slot = f"${{{{ github.event_name == 'schedule' && '{job.schedule}' || '' }}}}"
    retrain = {
        "name": "Retrain",
        **in_folder,
        "env": {"SLOT": slot},
        "run": retrain_line(job, '${SLOT:+--slot "$SLOT"}'),
    }
    return [
        {"uses": "actions/checkout@v6"},
        {"uses": "actions/setup-python@v6", "with": {"python-version": PYTHON}},
        {"name": "Install", **in_folder, "run": install_line(job)},
        *([restore] if folders else []),
        *([{"name": "Jitter", "run": sleep_line(job)}] if job.jitter_s else []),
        retrain,
        *([save] if folders else []),
    ]
