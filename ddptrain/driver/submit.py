"""Runs whose driver is a job of a batch system: submit it, see whether it waits, cancel it, have it started again."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ddptrain.clusters.provider import Backend, DriverJob
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.sections.clusters import provider_class
from ddptrain.config.workload_check import check_workload
from ddptrain.driver.resume import choose
from ddptrain.driver.transfer.environment import environment_of
from ddptrain.errors import DdptrainError, ExitCode, RunLocked, UsageError
from ddptrain.file_ops import time_in
from ddptrain.results.ownership import LockFile
from ddptrain.results.run import Run
from ddptrain.results.run_record import ENDED_BY_STOP, FailureRecord, JobRecord, RunRecord, RunStatus, utc_now
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns, open_runs_dir
from ddptrain.results.secure_files import read_bytes, write_file

_SUBMITTED_WITHIN_S = 120.0  # a command that submits the run may take that long
_ASK_EVERY_S = 10.0  # the batch system about a run in its queue


def submit(
    resolved: ResolvedConfig, command: Sequence[str], run_id: str | None, resume: str | None, allow_changes: bool
) -> tuple[Run, str]:
    """Create or choose the run directory, and have `ddptrain COMMAND` started for it in a job.

    Returns the run, whose status is then queued, and why `resume` chose it. A run that has succeeded is not submitted.

    Raises UsageError; RunLocked, also if the run is queued already; ResultsError; ClusterError if the batch system
    refuses the job. Nothing is left then.
    """
    config, runs = resolved.config, open_runs_dir(resolved.config.results.dir)
    if config.cluster.is_attached:
        raise UsageError("--submit starts workers in a job, and the cluster of this run is up already: use --detach")
    if not isinstance(runs, LocalRuns):
        raise UsageError(f"--submit needs a results.dir that this host and the job share, and it is {runs.where}")
    check_workload(resolved)
    if config.cluster.slurm is not None:  # a pod has files of its own
        environment_of(resolved)
    choice = choose(runs, resume, resolved, allow_changes=allow_changes, run_id=run_id) if resume else None
    if choice is not None and choice.done is not None:
        return choice.done, choice.reason
    before: dict[Path, bytes] = {}
    jobs: tuple[JobRecord, ...] = ()
    if choice is not None and choice.folder is not None:
        found = settled(Run(choice.folder))
        if found.status == RunStatus.QUEUED:
            raise RunLocked(f"run {found.run_id} is queued already: ddptrain stop {found.argument} takes it out")
        jobs = found.record.jobs
        before = {path: read_bytes(path) for path in (found.config_yaml, found.run_json) if path.exists()}
        writer = RunWriter.reopen(choice.folder, resolved.yaml_text, choice.driver)
    else:
        writer = RunWriter.create(runs.folder, run_id, config.name, resolved.yaml_text, config.workload_name)
    folder = writer.layout.root
    try:
        with writer:  # its driver takes the lock afterwards
            writer.enqueue((*jobs, JobRecord(config.cluster.backend)))
        place = ["--runs-dir", str(folder.parent), "--run-id", folder.name, "--resume", "auto", "--output", "plain"]
        given = {"name": config.name, **config.model_dump(mode="json", by_alias=True, exclude_defaults=True)}
        driver = DriverJob(config.name, folder.name, folder, command, place, given)
        backend = _backend(config.cluster.backend)
        job = JobRecord(config.cluster.backend, backend.submit(config.cluster, driver))
    except BaseException:
        if not before:
            shutil.rmtree(folder, ignore_errors=True)
        for path, content in before.items():
            write_file(path, content)
        raise

    def with_job(record: RunRecord) -> RunRecord:
        known = [each for each in record.jobs if each.id]
        return dataclasses.replace(record, jobs=(*known, *([] if any(each.id == job.id for each in known) else [job])))

    record = _changed(folder, with_job).record
    if record.failure is not None and record.failure.is_users_order:  # it was stopped before its job was known
        backend.cancel_job(job.id)
    return Run(folder, with_job(record)), choice.reason if choice is not None else ""


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


def settling(look: Callable[[], Run]) -> Callable[[], Run]:
    """Return `look` with settled() runs; the batch system is asked every 10 s at most, or when the run has changed."""
    seen: RunRecord | None = None
    known: Run | None = None
    asked_at = -math.inf

    def current() -> Run:
        nonlocal seen, known, asked_at
        found = look()
        if found.status != RunStatus.QUEUED:
            return found
        if known is None or found.record != seen or time.monotonic() - asked_at > _ASK_EVERY_S:
            asked_at, seen, known = time.monotonic(), found.record, settled(found)
        return known

    return current


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
    for job in (job for job in record.jobs[-1:] if job.id):
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
    with suppress(RunLocked), LockFile(Run(folder).lock_file):
        run = Run(folder, is_ours=True)
        if run.status == RunStatus.QUEUED:
            write_file(run.run_json, change(run.record).to_json().encode())
    return Run(folder)


def _backend(name: str) -> Backend:
    return cast(Backend, provider_class(name)())
