"""Finds runs by id, prefix, `latest` or folder, and determines their status. Writes nothing."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results import ownership
from ddptrain.results.annotations import Annotations, read_annotations
from ddptrain.results.layout import (
    LATEST,
    MANIFEST,
    PRUNED,
    RunLayout,
    checkpoint_folders,
    origin_of,
    step_of,
    valid_run_id,
    where_of,
)
from ddptrain.results.run_record import FailureRecord, RecordError, RunRecord, RunStatus
from ddptrain.results.secure_files import read_bytes
from ddptrain.results.tracker_records import tracker_outputs

DRIVER_GONE = "the driver has ended without a result (killed?)"
_MOST_LISTED = 10
_TRIAL = re.compile(r"([^/]+)-\d{4,}(?:-s\d+)?")  # the run id of a trial begins with that of its sweep
_NUMBERED = re.compile(r"([^/]+)/(\d{1,9})")
_ID_TIME = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")


@dataclass(frozen=True, slots=True)
class RunView:
    """A run: `record` has the status as determined now; `problem` says why run.json can't be read, or is ""."""

    layout: RunLayout
    record: RunRecord
    problem: str = ""

    @property
    def run_id(self) -> str:
        """The name of its folder in the runs folder."""
        return self.record.run_id

    @property
    def status(self) -> str:
        """One of RunStatus, or a status of a newer version."""
        return self.record.status

    @property
    def shown_status(self) -> str:
        """The status for messages: a running run without ranks is waiting."""
        return RunStatus.WAITING if self.is_running and self.record.waiting else self.status

    @property
    def status_text(self) -> str:
        """The status for people; see RunRecord."""
        return self.record.status_text if self.status == self.shown_status else self.shown_status

    @property
    def is_running(self) -> bool:
        """Whether its driver is working."""
        return self.record.status == RunStatus.RUNNING

    @property
    def duration_s(self) -> float | None:
        """Seconds from start to end, or until now. Of a resumed run: without the time in which it was stopped."""
        if self.record.duration_s is not None:
            return self.record.duration_s
        began = parse_time(self.record.resumed_at or self.record.started_at)
        ended = parse_time(self.record.ended_at)
        if began is None or (ended is None and not self.is_running):
            return None
        return max(0.0, self.record.earlier_s) + max(0.0, ((ended or datetime.now(UTC)) - began).total_seconds())

    @property
    def annotations(self) -> Annotations:
        """Its tags and its note, as they are now."""
        return read_annotations(self.layout.root)

    def as_dict(self) -> dict[str, Any]:
        """Return the record for --json, with the run directory, tags, note and `problem`."""
        duration_s, annotations = self.duration_s, self.annotations
        return {
            **self.record.as_dict(),
            "tracking": tracker_outputs(self.layout, self.record),
            "duration_s": None if duration_s is None else round(duration_s, 3),
            "run_dir": self.layout.where,
            "tags": list(annotations.tags),
            "note": annotations.note,
            "problem": self.problem or None,
        }


def parse_time(text: str | None) -> datetime | None:
    """Parse a time of run.json. Returns None for None, and for text that is not a time."""
    try:
        parsed = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def time_text(text: str | None) -> str:
    """Return a time of run.json as people write it, to the second; "" for none, and for other text."""
    parsed = parse_time(text)
    return f"{parsed:%Y-%m-%d %H:%M:%S}" if parsed else ""


def list_runs(runs_dir: Path, kind: str = "") -> list[RunView]:
    """Return every run of that kind in the folder, newest first; no runs if it does not exist. Raises UsageError."""
    try:
        folders = [path for path in runs_dir.iterdir() if _has_record(path) and is_sweep(path) == bool(kind)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot list runs in {runs_dir}: {error.strerror}; choose another with --runs-dir") from error
    views = [view for view in map(load_run, folders) if view.record.kind == kind]
    return sorted(views, key=_age, reverse=True)


def find_run(runs_dir: Path, run: str) -> Path:
    """Return the directory of a run. `run` is its id, an unambiguous prefix, `latest`, a path, or SWEEP/7 for a trial.

    Raises RunNotFound, with a list of existing runs, if no run or more than one run matches.
    """
    if "\0" in run:
        raise RunNotFound("a run's name can't hold a NUL character")
    if "/" not in run and run not in ("", ".", ".."):
        if run == LATEST:
            if runs := list_runs(runs_dir):
                return runs[0].layout.root
            raise RunNotFound(
                f"there is no run in {where_of(runs_dir)} yet; start one with ddptrain train "
                "(--runs-dir: another folder)"
            )
        if _is_run(runs_dir / run):
            return runs_dir / run
        if (trial := _trial(runs_dir, run)) is not None:
            return trial
        matches = sorted(name for name in _names(runs_dir) if name.startswith(run))
        if len(matches) == 1:
            return runs_dir / matches[0]
        if matches:
            raise RunNotFound(
                f'"{shorten(run)}" matches {len(matches)} runs: {_first_names(matches)}; '
                "give more characters of the name"
            )
    if run and _is_run(Path(run)):
        return Path(os.path.abspath(run))
    if (trial := _trial(runs_dir, run)) is not None:
        return trial
    raise RunNotFound(_not_found_message(runs_dir, run))


def _trial(runs_dir: Path, name: str) -> Path | None:
    """Return the directory of a trial, given by its id or as SWEEP/7; None if it does not exist."""
    if numbered := _NUMBERED.fullmatch(name):
        name = f"{numbered[1]}-{int(numbered[2]):04d}"
    trial = _TRIAL.fullmatch(name)
    folder = runs_dir / trial[1] / name if trial else None
    return folder if folder is not None and _is_run(folder) else None


def newest_trained(views: Sequence[RunView], workload: str) -> RunView:
    """Return the first run of a workload that has a checkpoint; views: newest first. Raises RunNotFound."""
    of_workload = [view for view in views if view.record.workload == workload]
    for view in of_workload:
        if view.record.checkpoints:
            return view
    place = views[0].layout.where.rpartition("/")[0] if views else "the folder"
    if of_workload:
        raise RunNotFound(f"no run of {workload} in {place} has a checkpoint yet: train one for an epoch first")
    raise RunNotFound(f"there is no run of {workload} in {place}: train one first (--runs-dir names another folder)")


def _not_found_message(runs_dir: Path, run: str) -> str:
    if (about_sweep := _about_sweep(runs_dir, run)) is not None:
        return about_sweep
    names = _names(runs_dir)
    what = f'no run "{shorten(run)}" in {where_of(runs_dir)}'
    if os.path.isdir(run):
        what += f', and the folder "{shorten(run)}" contains no run.json'
    if not names:
        return f"{what}, which contains no runs (--runs-dir names another folder)"
    match = nearest(run, names)
    newest = [view.run_id for view in list_runs(runs_dir)]
    return f"{what}; " + (f"did you mean {match}?" if match else f"there are: {_first_names(newest)}")


def _about_sweep(runs_dir: Path, run: str) -> str | None:
    """Return the message for the name of a sweep, and for SWEEP/7 without that trial; None for other names."""
    numbered = _NUMBERED.fullmatch(run)
    for name in filter(None, (run, numbered and numbered[1])):
        for folder in (runs_dir / name, Path(name)):
            if not is_sweep(folder):
                continue
            trials = sorted(_names(folder))
            what = f'sweep "{shorten(name)}" has no trial {numbered[2]}' if numbered else f'"{shorten(run)}" is a sweep'
            rest = f"; its trials are runs: {_first_names(trials)}" if trials else ", and no trial has begun"
            return what + rest
    return None


def _first_names(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _names(runs_dir: Path) -> list[str]:
    try:
        return [path.name for path in runs_dir.iterdir() if _is_run(path)]
    except OSError:
        return []


def is_sweep(folder: Path) -> bool:
    """Return whether the folder is that of a sweep, whose trials are the runs below it."""
    return os.path.isfile(f"{folder}/sweep.json")


def _has_record(folder: Path) -> bool:
    return not folder.name.startswith(PRUNED) and os.path.isfile(f"{folder}/run.json")


def _is_run(folder: Path) -> bool:
    return _has_record(folder) and not is_sweep(folder)


def _age(view: RunView) -> tuple[datetime, str]:
    started = parse_time(view.record.started_at)
    return started or datetime.fromtimestamp(ownership.changed_at(view.layout), UTC), view.run_id


def load_run(path: Path, *, is_ours: bool = False) -> RunView:
    """Return the run in `path` with its present status. If run.json can't be read, `problem` of the result says why.

    is_ours: this process holds the lock, so no driver is alive.
    """
    layout = RunLayout(path)
    try:
        record = _read(layout)
        if record.status == RunStatus.RUNNING and (origin := origin_of(path)) and origin.alive is not None:
            return RunView(layout, record if origin.alive else _abandoned(layout, record))
        if record.status == RunStatus.RUNNING and (is_ours or not ownership.is_alive(layout, record.driver)):
            record = _read(layout)  # the run may have ended meanwhile
            if record.status == RunStatus.RUNNING:
                record = _abandoned(layout, record)
        return RunView(layout, record)
    except (OSError, RecordError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot read {layout.run_json}: {cause}"
        return RunView(layout, _unreadable(layout), problem)


def _read(layout: RunLayout) -> RunRecord:
    record = RunRecord.from_json(read_bytes(layout.run_json))
    if not valid_run_id(record.run_id):  # commands make files of that name
        raise RecordError(f'run_id is "{shorten(record.run_id)}", which cannot be the name of a run')
    return record


def _abandoned(layout: RunLayout, record: RunRecord) -> RunRecord:
    failure = FailureRecord(host=record.driver.host, kind="driver", message=DRIVER_GONE)
    return dataclasses.replace(
        record, status=RunStatus.FAILED, failure=failure, ended_at=_iso(ownership.changed_at(layout))
    )


def _unreadable(layout: RunLayout) -> RunRecord:
    started = ""
    if named := _ID_TIME.search(layout.root.name):
        with suppress(ValueError):
            started = _iso(datetime.strptime(named[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp())
    return RunRecord(run_id=layout.root.name, status=RunStatus.UNREADABLE, started_at=started)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def find_checkpoint(layout: RunLayout, which: str = LATEST) -> Path:
    """Return the folder of a checkpoint: `latest`, `best`, or a name such as step-100.

    If the pointer file or its checkpoint is missing, the newest checkpoint is returned.

    Raises RunNotFound if the run has no such checkpoint.
    """
    folders = {step_of(path.name): path for path in checkpoint_folders(layout) if (path / MANIFEST).is_file()}
    if not folders:
        raise RunNotFound(f"run {layout.root.name} has no checkpoint")
    step = step_of(which)
    if step is not None and step not in folders:
        available = ", ".join(path.name for path in reversed(folders.values()))
        raise RunNotFound(f"run {layout.root.name} has no checkpoint {which}; it has {available}")
    if step is None:
        with suppress(OSError):
            step = step_of(read_bytes(layout.checkpoints_dir / which).decode(errors="replace").strip())
    return folders.get(step) or next(iter(folders.values()))  # the newest one is the first
