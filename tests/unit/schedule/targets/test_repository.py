"""GitHub and GitLab: the workflow and the job, with paths in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ddptrain import __version__
from ddptrain.errors import UsageError
from ddptrain.schedule.job import Job
from ddptrain.schedule.targets.repository import GitHub, GitLab
from tests.unit.schedule.jobs import make_job

WORKFLOW = f"""
name: retrain petnames
"on":
  schedule: [{{cron: 0 3 * * 1, timezone: Europe/Berlin}}]
  workflow_dispatch: {{}}
permissions: {{contents: read}}
concurrency: {{group: ddptrain-petnames, cancel-in-progress: false}}
jobs:
  retrain:
    runs-on: gpu
    timeout-minutes: 70
    env: {{SLACK_URL: "${{{{ secrets.SLACK_URL }}}}"}}
    steps:
    - uses: actions/checkout@v6
    - uses: actions/setup-python@v6
      with: {{python-version: "3.12"}}
    - name: Install
      working-directory: pets
      run: pip install ddptrain=={__version__}
    - uses: actions/cache/restore@v5
      with:
        path: "pets/models\\npets/runs"
        key: "ddptrain-petnames-${{{{ github.run_id }}}}"
        restore-keys: ddptrain-petnames-
    - name: Jitter
      run: sleep "$(shuf -i 0-60 -n 1)"
    - name: Retrain
      working-directory: pets
      env: {{SLOT: "${{{{ github.event_name == 'schedule' && 'Mon 03:00 Europe/Berlin' || '' }}}}"}}
      run: ddptrain retrain nightly.yaml ${{SLOT:+--slot "$SLOT"}}
    - uses: actions/cache/save@v5
      if: always()
      with:
        path: "pets/models\\npets/runs"
        key: "ddptrain-petnames-${{{{ github.run_id }}}}"
"""


def in_repository(tmp_path: Path, **changes: Any) -> Job:
    folder = tmp_path / "pets"
    folder.mkdir()
    (tmp_path / ".git").mkdir()
    return make_job(folder=folder, **changes)


def test_workflow_of_github(tmp_path: Path) -> None:
    job = in_repository(tmp_path, secrets=("SLACK_URL",), jitter_s=60, deadline_s=3600.0)
    [part] = GitHub("gpu").parts(job, None)
    assert yaml.safe_load(part.text) == yaml.safe_load(WORKFLOW)
    assert part.path == tmp_path / ".github" / "workflows" / "ddptrain-petnames.yml"


def test_job_of_gitlab(tmp_path: Path) -> None:
    [part] = GitLab(runner="gpu").parts(in_repository(tmp_path, deadline_s=3600.0), None)
    assert yaml.safe_load(part.text) == {
        "retrain petnames": {
            "image": "python:3.12",
            "rules": [{"if": '$CI_PIPELINE_SOURCE == "schedule" && $DDPTRAIN_SCHEDULE == "petnames"'}],
            "resource_group": "ddptrain-petnames",
            "interruptible": False,
            "timeout": "70 minutes",
            "tags": ["gpu"],
            "cache": {"key": "ddptrain-petnames", "paths": ["pets/models", "pets/runs"], "when": "always"},
            "script": [
                "cd pets",
                f"pip install ddptrain=={__version__}",
                "ddptrain retrain nightly.yaml --slot 'Mon 03:00 Europe/Berlin'",
            ],
            "allow_failure": {"exit_codes": [8]},
            "retry": {
                "max": 2,
                "when": ["runner_system_failure", "stuck_or_timeout_failure"],
                "exit_codes": [75],
            },
        }
    }
    assert part.path == tmp_path / ".gitlab" / "ddptrain-petnames.yml"


def test_registry_in_a_store_needs_no_cache(tmp_path: Path) -> None:
    job = in_repository(tmp_path, models_dir="s3://pets/models", runs_dir="s3://pets/runs")
    assert "cache" not in GitHub().parts(job, None)[0].text
    assert "cache" not in GitLab().parts(job, None)[0].text


def test_requirements_of_the_project_are_installed(tmp_path: Path) -> None:
    job = in_repository(tmp_path)
    (job.workdir / "requirements.txt").touch()
    line = f"pip install ddptrain=={__version__} -r requirements.txt"
    assert line in GitHub().parts(job, None)[0].text
    assert line in GitLab().parts(job, None)[0].text
    assert "pip install" not in GitLab(image="registry.example.org/pets").parts(job, None)[0].text


@pytest.mark.parametrize("target", [GitHub(), GitLab()])
def test_configuration_outside_a_repository_is_refused(tmp_path: Path, target: GitHub | GitLab) -> None:
    with pytest.raises(UsageError, match="is in no git repository"):
        target.parts(make_job(folder=tmp_path), None)


@pytest.mark.parametrize("target", [GitHub(), GitLab()])
def test_folder_outside_the_repository_is_refused(tmp_path: Path, target: GitHub | GitLab) -> None:
    with pytest.raises(UsageError, match="is not in the repository"):
        target.parts(in_repository(tmp_path, workdir=tmp_path.parent), None)


def test_github_refuses_intervals_below_five_minutes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GitHub starts workflows every 5 minutes at most, not every 1m"):
        GitHub().parts(in_repository(tmp_path, at="every 1m"), None)


def test_notes_of_gitlab_create_the_schedule() -> None:
    notes = GitLab().notes(make_job())
    assert any("glab schedule create --cron '0 3 * * 1' --cronTimeZone Europe/Berlin" in note for note in notes)
