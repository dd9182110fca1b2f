"""What workflows of GitHub and GitLab have in common: paths in the repository, and the steps before the retraining."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ddptrain import __version__
from ddptrain.errors import UsageError
from ddptrain.schedule.job import Job
from ddptrain.storage.remote_folder import is_url

PYTHON = "3.12"


def root_of(job: Job) -> Path:
    """Return the folder of the repository with the configuration. Raises UsageError if there is none."""
    for folder in job.config.parents:
        if (folder / ".git").exists():
            return folder
    raise UsageError(f"{job.config} is in no git repository, where a workflow could find it: commit it to one first")


def inside(job: Job, path: Path) -> str:
    """Return a path relative to the repository. Raises UsageError if it is elsewhere."""
    root = root_of(job)
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise UsageError(f"{path} is not in the repository {root}: run the command in a folder of it") from None


def install_line(job: Job) -> str:
    """Return the shell command that installs ddptrain and the requirements of the repository."""
    requirements = " -r requirements.txt" if (job.workdir / "requirements.txt").is_file() else ""
    return f"pip install ddptrain=={__version__}{requirements}"


def kept_folders(job: Job) -> list[str]:
    """Return the folders that the next start needs, relative to the repository: the registry and the runs."""
    folders = [place for place in (job.models_dir, job.runs_dir) if not is_url(place)]
    return [inside(job, job.workdir / folder) for folder in folders]


def retrain_line(job: Job, slot: str) -> str:
    """Return the shell command; slot: its option --slot, as shell text."""
    inside(job, job.workdir)
    config = os.path.relpath(job.config.resolve(), job.workdir.resolve())
    return f"ddptrain retrain {shlex.quote(config)} {slot}"
