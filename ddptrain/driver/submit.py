"""Runs whose driver is a job of a batch system: submit it, see whether it waits, cancel it, have it started again."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ddptrain.clusters.provider import Backend, DriverJob
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.sections.clusters import provider_class
from ddptrain.config.workload_check import check_workload
from ddptrain.driver.resume import choose
from ddptrain.errors import DdptrainError, ExitCode, RunLocked, UsageError
from ddptrain.file_ops import time_in
from ddptrain.results.ownership import LockFile
from ddptrain.results.run import Run
from ddptrain.results.run_record import ENDED_BY_STOP, FailureRecord, JobRecord, RunRecord, RunStatus, utc_now
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns, open_runs_dir
from ddptrain.results.secure_files import write_file

_SUBMITTED_WITHIN_S = 120.0  # a command that submits the run may take that long


def submit(
    resolved: ResolvedConfig, command: Sequence[str], run_id: str | None, resume: str | None, allow_changes: bool
) -> tuple[Run, str]:
    """Create or choose the run directory, and have `ddptrain COMMAND` started for it in a job.

    Returns the run, whose status is then queued, and why `resume` chose it. A run that has succeeded is not submitted.

    Raises UsageError, RunLocked, ResultsError; ClusterError if the batch system refuses the job. Nothing is left then.
    """
    config, runs = resolved.config, open_runs_dir(resolved.config.results.dir)
    if config.cluster.is_attached:
        raise UsageError("--submit starts workers in a job, and the cluster of this run is up already: use --detach")
    if not isinstance(runs, LocalRuns):
        raise UsageError(f"--submit needs a results.dir that this host and the job share, and it is {runs.where}")
    check_workload(resolved)
    choice = choose(runs, resume, resolved, allow_changes=allow_changes, run_id=run_id) if resume else None
    if choice is not None and choice.done is not None:
        return choice.done, choice.reason
    if choice is not None and choice.folder is not None:
        before: bytes | None = Run(choice.folder).read("run.json")
        writer = RunWriter.reopen(choice.folder, resolved.yaml_text, choice.driver)
    else:
        before = None
        writer = RunWriter.create(runs.folder, run_id, config.name, resolved.yaml_text, config.workload_name)
    folder = writer.layout.root
    try:
        with writer:  # its driver takes the lock afterwards
            writer.enqueue(() if before is None else RunRecord.from_json(before).jobs)
        place = ["--runs-dir", str(folder.parent), "--run-id", folder.name, "--resume", "auto", "--output", "plain"]
        given = {"name": config.name, **config.model_dump(mode="json", by_alias=True, exclude_defaults=True)}
        driver = DriverJob(config.name, folder.name, folder, command, place, given)
        job = JobRecord(config.cluster.backend, _backend(config.cluster.backend).submit(config.cluster, driver))
    except BaseException:
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            write_file(writer.layout.run_json, before)
        raise
    run = _changed(folder, lambda record: dataclasses.replace(record, jobs=_with(record.jobs, job)))
    return run, choice.reason if choice is not None else ""


def settled(run: Run) -> Run:
    """Return a run with the state of its job, if it is queued; as failed if the job has ended without a driver."""
    if run.status != RunStatus.QUEUED:
        return run
    *others, job = run.record.jobs or (JobRecord(),)
    try:
        state = _backend(job.backend).job_state(job.id) if job.id else ""
    except DdptrainError:  # the batch system is not known on this host
        return run
    if not state and not job.id and time_in(run.root) - run.changed_at < _SUBMITTED_WITHIN_S:
        return run
    if state:
        jobs = (*others, dataclasses.replace(job, state=state))
        return Run(run.root, dataclasses.replace(run.record, jobs=jobs))
    if (now := run.again()).status != RunStatus.QUEUED:  # its driver has begun meanwhile
        return now
    message = f"{job.description} has ended without running it" if job.id else "it was not submitted: the command ended"
    failure = FailureRecord(kind="driver", message=f"{message}; submit it again, with --resume {run.run_id}")
    return Run(run.root, dataclasses.replace(run.record, status=RunStatus.FAILED, exit_code=None, failure=failure))


def cancel(run: Run) -> Run:
    """End a queued run, and its job; return the run, which may have begun meanwhile. Raises ClusterError."""
    record = run.record
    saved = bool(record.checkpoints)
    end: dict[str, Any] = {
        "status": RunStatus.PREEMPTED if saved else RunStatus.CANCELLED,
        "exit_code": int(ExitCode.PREEMPTED) if saved else int(ExitCode.TERMINATED),
        "failure": FailureRecord(kind="interrupted", message=ENDED_BY_STOP, cause=ENDED_BY_STOP),
        "ended_at": utc_now(),
    }
    for job in record.jobs[-1:]:
        _backend(job.backend).cancel_job(job.id)
    return _changed(run.root, lambda record: dataclasses.replace(record, **end))


def job_to_restart(run_id: str, failure: FailureRecord | None, warn: Callable[[str], None]) -> JobRecord | None:
    """Return the job of this process if it goes on after a preemption: it was submitted, and nobody ends it."""
    job = JobRecord.submitted(run_id)
    if job is None or (failure is not None and failure.is_users_order):
        return None
    try:
        state = _backend(job.backend).job_state(job.id)
    except DdptrainError as error:
        warn(f"{job.description} is not started again: {error}")
        return None
    if state.partition(" ")[0] != "RUNNING":
        warn(f"{job.description} is {state or 'ending'}, and is not started again")
        return None
    return job


def restart(job: JobRecord) -> None:
    """Have the job of this process started again. Raises ClusterError."""
    _backend(job.backend).restart_job(job.id)


def _changed(folder: Path, change: Callable[[RunRecord], RunRecord]) -> Run:
    """Change the record of a queued run; return the run, unchanged if its driver has begun."""
    owner = LockFile(Run(folder).lock_file)
    try:
        owner.take()
        run = Run(folder, is_ours=True)
        if run.status == RunStatus.QUEUED:
            write_file(run.run_json, change(run.record).to_json().encode())
    except RunLocked:
        pass
    finally:
        owner.release()
    return Run(folder)


def _with(jobs: Sequence[JobRecord], job: JobRecord) -> tuple[JobRecord, ...]:
    return (*jobs, *([] if any(each.id == job.id for each in jobs) else [job]))


def _backend(name: str) -> Backend:
    return cast(Backend, provider_class(name)())
