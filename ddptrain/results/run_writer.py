"""Writes a run directory. Each call returns when its data are written; only metrics may wait for flush()."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ddptrain.errors import DdptrainError, ExitCode, Interrupted, RunLocked, UsageError
from ddptrain.host_identity import is_this_host
from ddptrain.protocol.events import CheckpointSaved, FileSaved, Metrics
from ddptrain.protocol.news import SystemSample
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy, RunCheckpoints, discard_staged
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, read_manifest
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import check_run_id, checkpoint_folders, new_run_id
from ddptrain.results.metrics import LatestMetrics, continued_line, read_series
from ddptrain.results.ownership import LockFile, Owner, is_held
from ddptrain.results.provenance import git_diff, git_state, installed_versions, without_secrets
from ddptrain.results.recorded_config import parsed_config
from ddptrain.results.run import Run
from ddptrain.results.run_record import (
    AttemptRecord,
    DriverRecord,
    FailureRecord,
    JobRecord,
    ProgressRecord,
    RunRecord,
    RunStatus,
    jobs_with_this,
    utc_now,
)
from ddptrain.results.secure_files import JsonLines, make_folder, require_own_folder, write_file
from ddptrain.results.staged_files import adopt_file
from ddptrain.results.system import SystemFile

if TYPE_CHECKING:
    from ddptrain.results.remote.uploader import Uploader

_NUMBERS_EVERY_S = 1.0  # metrics and progress
_SAVING_SHARE = 50  # at most one part in so many of the time is for numbers in run.json, which grows with the ranks
_SETTLE_S = 1.0  # for two hosts that do not see each other's lock: both then see who wrote the lock file last
_OWN_FIELDS = frozenset({"event", "run_id", "run_dir", "status"})  # fields of events in which no secret is looked for


class RunWriter:
    """Writes one run's directory and holds its lock, as a context manager.

    The driver's threads may share it. One thread at a time may call adopt_checkpoint() and adopt_file(), which do not
    block the others. Texts in `secrets` are left out of failures and events.
    """

    def __init__(self, layout: Run, record: RunRecord, owner: Owner) -> None:
        self.layout = layout
        self.secrets: Sequence[str] = ()
        self.upload: Uploader | None = None  # of a run in a store
        self._record = record
        self.last_versions: Mapping[str, str] = {}  # of Python and packages, at the last start of rank 0
        self._owner = owner
        self.loss: DdptrainError | None = None  # set when another driver has the run: nothing is written any more
        self._mutex = threading.RLock()
        self._started = time.monotonic()
        self._finished = False
        self._saving_s = 0.0
        self._checkpoints = RunCheckpoints(layout.checkpoints_dir)
        self._latest = LatestMetrics()
        for folder in (layout.logs_dir, layout.checkpoints_dir, layout.artifacts_dir):
            make_folder(folder)
        self._events = JsonLines(layout.events_jsonl)
        self._metrics = JsonLines(layout.metrics_jsonl)
        self._system = SystemFile(layout.system_jsonl)
        self.event({"event": "driver_started", "host": record.driver.host, "pid": record.driver.pid})
        self._save()

    @classmethod
    def create(
        cls,
        runs_dir: Path,
        run_id: str | None,
        name: str,
        config_text: str,
        workload: str,
        *,
        world_size: int = 0,
        kind: str = "",
    ) -> Self:
        """Create the directory of a new run, take its lock, and write config.yaml and run.json.

        Raises UsageError, RunLocked, ResultsError; see _claim().
        """
        layout, owner = _claim(runs_dir.absolute(), run_id, name)
        record = RunRecord(
            run_id=layout.root.name,
            name=name,
            kind=kind,
            workload=workload,
            waiting=not kind,
            started_at=utc_now(),
            world_size=world_size,
            params=_params_in(config_text),
            git=git_state(Path.cwd()),
            versions=installed_versions(),
            driver=DriverRecord.of_this_process(),
            jobs=jobs_with_this((), layout.root.name),
        )
        try:
            write_file(layout.config_yaml, config_text.encode())
            return cls(layout, record, owner)
        except BaseException:
            shutil.rmtree(layout.root, ignore_errors=True)  # it was empty when it was claimed
            owner.release()
            raise

    @classmethod
    def reopen(cls, folder: Path, config_text: str, expected_driver: DriverRecord | None = None) -> Self:
        """Continue a run that has ended, or whose driver has died: take its lock, and write config.yaml and run.json.

        expected_driver: the run's last driver when the run was chosen; None: any.

        Raises RunLocked, UsageError, ResultsError; see _continue_run().
        """
        layout, owner = _continue_run(folder.absolute(), expected_driver)
        try:
            record = dataclasses.replace(
                layout.record,
                status=RunStatus.RUNNING,
                waiting=True,
                queued=None,
                exit_code=None,
                ended_at=None,
                duration_s=None,
                earlier_s=layout.duration_s or 0.0,
                resumed_at=utc_now(),
                failure=None,
                result=None,
                progress=None,
                time_use_s={},
                goodput=None,
                params=_params_in(config_text),
                git=git_state(Path.cwd()),
                versions=installed_versions(),
                driver=DriverRecord.of_this_process(),
                jobs=jobs_with_this(layout.record.jobs, layout.run_id),
                attempts=tuple(_ended(attempt, layout.record.ended_at) for attempt in layout.record.attempts),
            )
            if layout.status == RunStatus.QUEUED and not layout.record.attempts:
                record = dataclasses.replace(record, started_at=record.resumed_at or "", resumed_at=None)
            write_file(layout.config_yaml, config_text.encode())
            writer = cls(layout, record, owner)
            writer.last_versions = layout.record.versions
            if layout.is_original and not is_this_host(layout.record.driver.host, layout.record.driver.boot_id):
                time.sleep(_SETTLE_S)
                owner.assure()  # no driver on a third host has resumed the run at the same time
            writer._latest.begin_attempt(record.last_metrics)
            return writer
        except BaseException:
            owner.release()
            raise

    def keep_heartbeat(self, lost: Callable[[DdptrainError], None]) -> None:
        """Touch the lock file in a thread; `lost` is called by the thread if another driver has the run."""

        def stop_writing(error: DdptrainError) -> None:
            self.loss = error
            lost(error)

        self._owner.keep(stop_writing)

    def begin_upload(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Upload the run from now on, if it is one of a store. See Uploader.begin."""
        if self.upload is not None:
            self.upload.begin(warn, lost)

    def _written(self, name: str) -> None:
        if self.upload is not None:
            self.upload.put(name)

    def finish_upload(self, deadline_s: float) -> str:
        """Return "" when the store has everything, or one line about the problem if the deadline was reached."""
        return "" if self.upload is None else self.upload.flush(deadline_s)

    def next_attempt(self, checkpoint: VerifiedCheckpoint | None, world_size: int = 0) -> AttemptRecord:
        """Return the record of the next attempt, which continues from a checkpoint."""
        step, epoch = (None, None) if checkpoint is None else (checkpoint.step, checkpoint.epoch)
        number = len(self._record.attempts) + 1
        return AttemptRecord(number, utc_now(), None, world_size, resumed_from=step, resumed_epoch=epoch)

    def go_on_from(self, checkpoint: VerifiedCheckpoint | None, policy: CheckpointPolicy) -> None:
        """Remove from run.json the metrics and checkpoints after `checkpoint`, from which the next attempt continues.

        None: the attempt begins at the start.
        """
        checkpoints = []
        for folder in reversed(checkpoint_folders(self.layout.checkpoints_dir)):
            with suppress(CheckpointDamaged):
                manifest = read_manifest(folder)
                if checkpoint is not None and manifest.step <= checkpoint.step:
                    checkpoints.append(manifest)
        self._checkpoints.restore(checkpoints, policy)
        with self._mutex:
            if checkpoint is not None and self._record.attempts and self.loss is None:
                number = len(self._record.attempts) + 1
                self._metrics.add(continued_line(number, checkpoint.step, checkpoint.epoch))
            self.flush()
            series = read_series(self.layout.metrics_jsonl)
            if series or checkpoints:
                self._latest = LatestMetrics.of(series, ((each.step, each.metrics) for each in checkpoints))
            self._latest.begin_attempt()
            self.update(checkpoints=self._checkpoints.names, best=self._checkpoints.best, not_finite=None)
        if self.upload is not None:
            self.upload.put_checkpoints()

    def save_git_diff(self) -> None:
        """Write git.diff if the code has changes that are not committed. Raises ResultsError."""
        is_dirty = self._record.git is not None and self._record.git.dirty
        if text := git_diff(Path.cwd(), self.secrets) if is_dirty else "":
            write_file(self.layout.git_diff, text.encode(errors="replace"))
        else:
            with results_errors(self.layout.git_diff):
                self.layout.git_diff.unlink(missing_ok=True)  # of an earlier part of the run

    @property
    def record(self) -> RunRecord:
        """The content of run.json, with the newest metrics."""
        with self._mutex:
            return dataclasses.replace(self._record, last_metrics=self._latest.as_dict())

    @property
    def _run_s(self) -> float:
        """The seconds of the run so far, without the time between its parts if it was resumed."""
        return self._record.earlier_s + time.monotonic() - self._started

    @property
    def run_id(self) -> str:
        """The run's folder name."""
        return self._record.run_id

    def update(self, **changes: Any) -> None:
        """Change fields of run.json, named as in RunRecord; secrets in rank_environment are left out."""
        if "rank_environment" in changes:
            changes["rank_environment"] = without_secrets(changes["rank_environment"])
        if failure := changes.get("failure"):
            changes["failure"] = self._redacted(failure)
        if attempts := changes.get("attempts"):
            *others, last = attempts
            changes["attempts"] = (*others, dataclasses.replace(last, failure=self._redacted(last.failure)))
        with self._mutex:
            self._record = dataclasses.replace(self._record, **changes)
            self._save()

    def _redacted(self, failure: FailureRecord | None) -> FailureRecord | None:
        if failure is None:
            return None
        names = ("message", "traceback", "cause")
        texts: dict[str, Any] = {
            name: hide_credentials(str(hide_known(getattr(failure, name), self.secrets))) for name in names
        }
        return dataclasses.replace(failure, **texts)

    def event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line to events.jsonl; return it, without secrets.

        It has `time_s`, in seconds since 1970, and `run_s`, in seconds of the run so far, unless they are given.
        """
        kept = {
            name: value if name in _OWN_FIELDS else hide_known(value, self.secrets) for name, value in event.items()
        }
        line = {"time_s": time.time(), "run_s": round(self._run_s, 3), **kept}
        with self._mutex:
            if self.loss is None:
                self._events.append(line)
                self._written("events.jsonl")
        return line

    def add_metrics(self, logged: Iterable[Metrics], rank: int) -> None:
        """Append lines to metrics.jsonl with the next flush(); run.json follows a second or more later.

        It never has metrics that are not in the file.
        """
        attempt = self._record.attempts[-1].attempt if self._record.attempts else 1
        with self._mutex:
            for event in logged:
                if self.loss is None:
                    self._metrics.add(_metrics_line(event, rank, attempt))
                self._latest.logged(rank, event.step, event.values)
            self._save_if_due()

    def set_progress(self, progress: ProgressRecord | None) -> None:
        """Set the progress of the attempt; run.json follows a second or more later."""
        with self._mutex:
            self._record = dataclasses.replace(self._record, progress=progress)
            self._save_if_due()

    def _save_if_due(self) -> None:
        if time.monotonic() - self._saved_at >= max(_NUMBERS_EVERY_S, _SAVING_SHARE * self._saving_s):
            self._save()

    def system(self, sample: SystemSample) -> None:
        """Append the use of a host and its ranks to system.jsonl."""
        attempt = self._record.attempts[-1].attempt if self._record.attempts else 1
        with self._mutex:
            if self.loss is None:
                self._system.append(sample, attempt)
                self._written("system.jsonl")

    def flush(self) -> None:
        """Append the metrics that wait to metrics.jsonl."""
        with self._mutex:
            if self.loss is None:
                self._metrics.flush()

    def adopt_checkpoint(
        self,
        rank: int,
        event: CheckpointSaved,
        source: Path,
        policy: CheckpointPolicy,
        parts: Sequence[Path] = (),
        moved: Callable[[], None] = lambda: None,
    ) -> Path:
        """Move a staged checkpoint into the run directory; return its folder.

        source: the staging folder of `event.files`; parts: the staging folder of each of `event.parts`; moved: called
        after each part of a file.

        Raises CheckpointDamaged if a file does not match the event; ResultsError if the checkpoint can't be written.
        """
        self._require_run()
        versions = self._record.versions
        final = self._checkpoints.adopt(
            event, source, policy, world_size=self._record.world_size, versions=versions, parts=parts, moved=moved
        )
        with self._mutex:
            self._latest.logged(None, event.step, event.metrics)
        self.update(checkpoints=self._checkpoints.names, best=self._checkpoints.best)
        if self.upload is not None:
            self.upload.put_checkpoints()
        discard_staged(event, (source, *parts))  # last: a failure before this can be repeated
        return final

    def adopt_file(self, event: FileSaved, source: Path, moved: Callable[[], None] = lambda: None) -> Path:
        """Move a staged file to `event.path` below its area; return its path. `moved` is called after each part.

        Raises UnsafePath, FileDamaged, ResultsError; see staged_files.adopt_file.
        """
        self._require_run()
        path = adopt_file(self.layout.area(event.area), event, source, moved)
        self._written(path.relative_to(self.layout.root).as_posix())
        return path

    def finish(self, status: RunStatus, exit_code: int, failure: FailureRecord | None = None) -> None:
        """Write the end of the run into run.json; the lock is held until close()."""
        self._finished = True
        duration_s = round(self._run_s, 3)
        end = {"status": status, "exit_code": int(exit_code), "failure": failure, "ended_at": utc_now()}
        self.update(waiting=False, duration_s=duration_s, **end)

    def enqueue(self, jobs: tuple[JobRecord, ...]) -> None:
        """Write that a driver of a later job will begin or continue the run, which has had these jobs."""
        self._finished = True
        versions = self.last_versions if self._record.attempts else {}  # not those of this host
        self.update(status=RunStatus.QUEUED, waiting=False, driver=DriverRecord(), jobs=jobs, versions=versions)

    def close(self) -> None:
        """Release the lock and the files; closing twice is harmless."""
        self._owner.release()  # without the mutex: its thread may wait for it
        with self._mutex:
            self._events.close()
            self._metrics.close()
            self._system.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if not self._finished:
                # The error that leaves the block matters, not that the disk is full as well.
                with suppress(*((Exception,) if error else ())):
                    self._finish_for(error)
        finally:
            self.close()

    def _finish_for(self, error: BaseException | None) -> None:
        """Write the end of a run whose driver left without finish()."""
        if isinstance(error, KeyboardInterrupt):
            status, exit_code = RunStatus.CANCELLED, int(ExitCode.INTERRUPTED)
        else:
            status = RunStatus.CANCELLED if isinstance(error, Interrupted) else RunStatus.FAILED
            exit_code = int(error.exit_code) if isinstance(error, DdptrainError) else int(ExitCode.INTERNAL)
        expected = error is None or isinstance(error, DdptrainError | KeyboardInterrupt)
        failure = FailureRecord(
            host=self._record.driver.host,
            kind="driver",
            type=type(error).__name__ if error else "",
            message=str(error or "") or ("interrupted" if error else "the driver ended without recording why"),
            traceback="" if expected or error is None else "".join(traceback.format_exception(error)),
        )
        self.finish(status, exit_code, failure)

    def _require_run(self) -> None:
        """Raise DdptrainError if the run no longer belongs to this driver."""
        if self.loss is not None:
            raise self.loss

    def _save(self) -> None:
        self._saved_at = began = time.monotonic()
        if self.loss is not None:
            return
        self._metrics.flush()
        write_file(self.layout.run_json, self.record.to_json().encode())
        self._written("metrics.jsonl")
        self._saving_s = time.monotonic() - began


def _metrics_line(event: Metrics, rank: int, attempt: int) -> dict[str, object]:
    line: dict[str, object] = {"time_s": event.time_ns / 1e9, "step": event.step, "epoch": event.epoch}
    line |= {"rank": rank, "attempt": attempt}
    # A metric may be called epoch or step: it counts as the position where none was given.
    return line | {name: value for name, value in event.values.items() if line.get(name) is None}


def _params_in(config_text: str) -> Mapping[str, Any]:
    """Return the parameters of a config.yaml; commands that list many runs read them in run.json."""
    params = parsed_config(config_text).get("params")
    return params if isinstance(params, dict) else {}


def _ended(attempt: AttemptRecord, ended_at: str | None) -> AttemptRecord:
    """Return the attempt with an outcome: if its driver was killed, the attempt failed at `ended_at`."""
    if attempt.outcome is not None:
        return attempt
    return dataclasses.replace(attempt, outcome=str(RunStatus.FAILED), ended_at=attempt.ended_at or ended_at)


def _claim(runs_dir: Path, run_id: str | None, name: str) -> tuple[Run, Owner]:
    """Create the directory of a new run and take its lock.

    run_id: None for a new id that begins with `name`. Raises UsageError, RunLocked, ResultsError.
    """
    if run_id is not None:
        check_run_id(run_id)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"make the folder {runs_dir}: {error.strerror}"
        if isinstance(error, FileExistsError | NotADirectoryError):
            why = f"keep runs in {runs_dir}: it is not a folder"
        raise UsageError(f"cannot {why}; choose another with --runs-dir") from error
    while True:
        layout = Run(runs_dir / (run_id or new_run_id(name)))
        with results_errors(layout.root):
            try:
                layout.root.mkdir(mode=0o755)
            except FileExistsError:
                if run_id is None:
                    continue
                _refuse_unless_free(layout)
        require_own_folder(layout.root)
        owner = LockFile(layout.lock_file).take()
        try:
            _refuse_unless_free(layout)
        except BaseException:
            owner.release()
            raise
        return layout, owner


def _refuse_unless_free(layout: Run) -> None:
    """Raise if the folder has a run, or files other than those of a driver that was killed before it wrote run.json."""
    if layout.run_json.exists():
        if is_held(layout.lock_file):
            raise RunLocked(f"run {layout.root.name} is running; wait for it, or choose another --run-id")
        raise UsageError(f"run {layout.root.name} exists already in {layout.root.parent}; choose another --run-id")
    if not layout.root.is_dir() or (any(layout.root.iterdir()) and not layout.lock_file.exists()):
        raise UsageError(f"{layout.root} exists and is not a run's folder; choose another --run-id")


def _continue_run(folder: Path, expected_driver: DriverRecord | None) -> tuple[Run, Owner]:
    """Take the lock of a run that has ended; return the run.

    expected_driver: the last driver of the run when the caller chose it; None: any.

    Raises RunLocked if another process runs it, or has run it since it was chosen; UsageError, ResultsError.
    """
    require_own_folder(folder)
    before = Run(folder)  # its driver may be on a host whose lock is not seen here
    driver = expected_driver or before.record.driver
    if not (before.is_running and before.is_original) or is_held(before.lock_file):
        owner = LockFile(before.lock_file).take()
    else:
        raise RunLocked(
            f"run {before.run_id} is running on another host: {before.record.driver.description} still writes to it; "
            f"wait for it to end, or stop it with ddptrain stop {before.run_id}"
        )
    try:
        view = Run(folder, is_ours=True)
        if view.problem:
            raise UsageError(f"run {view.run_id} can't be resumed: {view.problem}")
        if view.record.driver != driver:
            raise RunLocked(
                f"run {view.run_id} was resumed by {view.record.driver.description} in the meantime; run the command "
                "again"
            )
        with results_errors(view.stop_json):
            view.stop_json.unlink(missing_ok=True)  # a request to the previous driver
    except BaseException:
        owner.release()
        raise
    return view, owner
