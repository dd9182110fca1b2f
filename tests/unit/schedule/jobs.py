"""A job for the tests of the targets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ddptrain.schedule.due_times import parse_schedule
from ddptrain.schedule.job import Job

WORK = Path("/srv/pets")


def make_job(at: str = "Mon 03:00", zone: str = "Europe/Berlin", folder: Path = WORK, **changes: object) -> Job:
    schedule = parse_schedule(at, zone)
    config = folder / "nightly.yaml"
    job = Job(
        name="petnames",
        model="petnames",
        config=config,
        workdir=folder,
        schedule=schedule,
        command=("/opt/venv/bin/ddptrain", "retrain", str(config), "--slot", str(schedule), "--output", "plain"),
        models_dir="models",
        runs_dir="runs",
        environment={"PATH": "/opt/venv/bin:/usr/bin"},
    )
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]
