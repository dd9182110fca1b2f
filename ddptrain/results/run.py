"""A run: its record with the status as it is now, and its files."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from ddptrain.config.wording import shorten
from ddptrain.errors import RunNotFound
from ddptrain.results import ownership
from ddptrain.results.annotations import FILE, Annotations
from ddptrain.results.layout import LATEST, MANIFEST, RunLayout, checkpoint_folders, files_below, step_of, valid_run_id
from ddptrain.results.run_record import SWEEP, FailureRecord, RecordError, RunRecord, RunStatus, text_of_time
from ddptrain.results.secure_files import is_own_folder
from ddptrain.results.tracker_records import tracker_outputs

DRIVER_GONE = "the driver has ended without a result (killed?)"
MODEL = (
    "run.json",
    "config.yaml",
    "artifacts/*.json",
    "inputs/*.json",
)  # what commands read of a run besides its checkpoint
_LOOK_EVERY_S = 0.5
_ID_TIME = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """What a list of runs needs of each run.json."""

    run_id: str = ""
    kind: str = ""
    started_at: str = ""


class Run(RunLayout):
    """A run of a folder of this machine. Its record is read when it is needed, once: another look is another Run.

    record: of a run that this process writes; by default that of run.json. is_ours: this process holds the lock, so no
    driver is alive.
    """

    def __init__(self, root: Path, record: RunRecord | None = None, *, is_ours: bool = False) -> None:
        super().__init__(root)
        self._given = record
        self._is_ours = is_ours

    @cached_property
    def _head(self) -> _Head:
        try:
            head = _head_adapter().validate_json(self.read("run.json"))
            return head if head.run_id else _Head(kind=self._kind())
        except (OSError, ValueError):
            return _Head(kind=self._kind())

    def _kind(self) -> str:
        return SWEEP if self.is_sweep else ""

    @property
    def kind(self) -> str:
        """SWEEP, or "" for a training."""
        return self._head.kind

    @property
    def is_sweep(self) -> bool:
        """Whether this is a sweep, whose trials are the runs below it."""
        return is_sweep(self.root)

    @cached_property
    def age(self) -> tuple[datetime, str]:
        """A key to sort runs by: when it began, and its id."""
        started = parse_time(self._head.started_at) if self._head.run_id else parse_time(self.record.started_at)
        return started or datetime.fromtimestamp(self.changed_at, UTC), self.root.name

    @cached_property
    def _loaded(self) -> tuple[RunRecord, str]:
        """The record, and why run.json cannot be read, or ""."""
        if self._given is not None:
            return self._given, ""
        try:
            record = self._parsed()
            if record.status == RunStatus.RUNNING and (self._is_ours or not self._has_driver(record)):
                record = self._parsed()  # the run may have ended meanwhile
                if record.status == RunStatus.RUNNING:
                    record = self._abandoned(record)
            return record, ""
        except (OSError, RecordError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            return self._unreadable(), f"cannot read {self.root / 'run.json'}: {why}"

    def _parsed(self) -> RunRecord:
        record = RunRecord.from_json(self.read("run.json"))
        if not valid_run_id(record.run_id):  # commands make files of that name
            raise RecordError(f'run_id is "{shorten(record.run_id)}", which cannot be the name of a run')
        return record

    def _has_driver(self, record: RunRecord) -> bool:
        """Return whether the driver of a run whose run.json says `running` is alive."""
        return ownership.is_alive(self, record.driver)

    def _abandoned(self, record: RunRecord) -> RunRecord:
        failure = FailureRecord(host=record.driver.host, kind="driver", message=DRIVER_GONE)
        ended_at = text_of_time(datetime.fromtimestamp(self.changed_at, UTC))
        return dataclasses.replace(record, status=RunStatus.FAILED, failure=failure, ended_at=ended_at)

    def _unreadable(self) -> RunRecord:
        started = ""
        if named := _ID_TIME.search(self.root.name):
            with suppress(ValueError):
                started = text_of_time(datetime.strptime(named[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC))
        return RunRecord(run_id=self.root.name, status=RunStatus.UNREADABLE, started_at=started)

    @property
    def record(self) -> RunRecord:
        """The content of run.json, with the status as it is now."""
        return self._loaded[0]

    @property
    def problem(self) -> str:
        """Why run.json cannot be read, or ""."""
        return self._loaded[1]

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
        """The status for messages: a running run without ranks is waiting, or queued if others hold its slots."""
        if not (self.is_running and self.record.waiting):
            return self.status
        return RunStatus.WAITING if self.record.queued is None else RunStatus.QUEUED

    @property
    def status_text(self) -> str:
        """The status for people; see RunRecord."""
        return self.record.status_text if self.status == self.shown_status else self.shown_status

    @property
    def is_running(self) -> bool:
        """Whether its driver is working."""
        return self.record.status == RunStatus.RUNNING

    @property
    def changed_at(self) -> float:
        """When a file of the run changed last, in seconds since 1970; 0 if there is none."""
        times = [0.0]
        for path in (self.run_json, self.events_jsonl, self.metrics_jsonl, *self.logs().values()):
            with suppress(OSError):
                times.append(path.lstat().st_mtime)
        return max(times)

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
        """Its tags and its note; they are empty if the file is missing or can't be read."""
        try:
            return Annotations.parse(self.read(FILE))
        except OSError:
            return Annotations()

    def as_dict(self) -> dict[str, Any]:
        """Return the record for --json, with the run directory, tags, note and `problem`."""
        duration_s, annotations = self.duration_s, self.annotations
        return {
            **self.record.as_dict(),
            "tracking": tracker_outputs(self, self.record),
            "duration_s": None if duration_s is None else round(duration_s, 3),
            "run_dir": self.where,
            "tags": list(annotations.tags),
            "note": annotations.note,
            "problem": self.problem or None,
        }

    def again(self) -> Self:
        """Return the run as it is now. Raises StoreError."""
        return type(self)(self.root)

    def follow(self, *patterns: str) -> Callable[[], Run]:
        """Return a function that returns the run as it was shortly before, with the files that match a pattern."""
        run, looked_at = self.again(), time.monotonic()

        def look() -> Run:
            nonlocal run, looked_at
            if time.monotonic() - looked_at >= _LOOK_EVERY_S:
                run, looked_at = self.again(), time.monotonic()
            return run

        return look

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(size for _, size in files_below(self.root))

    def why_foreign(self) -> str:
        """Return why this user must not change the run, or ""."""
        return "a symbolic link" if self.root.is_symlink() else "" if is_own_folder(self.root) else "of another user"

    def fetch(self, *patterns: str) -> Self:
        """Have the files below `root` whose paths match a pattern, such as "artifacts/*.json"; return this run."""
        return self

    def has_checkpoint(self) -> bool:
        """Return whether the run has a checkpoint to resume from."""
        return any((path / MANIFEST).is_file() for path in checkpoint_folders(self))

    def checkpoint(self, which: str = LATEST) -> Path:
        """Return the folder of a checkpoint: `latest`, `best`, or a name such as step-100.

        If the pointer file or its checkpoint is missing, the newest checkpoint is returned. Raises RunNotFound.
        """
        folders = {step_of(path.name): path for path in self.checkpoints()}
        if not folders:
            raise RunNotFound(f"run {self.root.name} has no checkpoint")
        step = step_of(which)
        if step is not None and step not in folders:
            available = ", ".join(path.name for path in reversed(folders.values()))
            raise RunNotFound(f"run {self.root.name} has no checkpoint {which}; it has {available}")
        if step is None:
            with suppress(OSError):
                step = step_of(self.read(f"checkpoints/{which}").decode(errors="replace").strip())
        return folders.get(step) or next(iter(folders.values()))  # the newest one is the first

    def checkpoints(self) -> list[Path]:
        """Return the folders of all checkpoints, the highest step first."""
        return [path for path in checkpoint_folders(self) if (path / MANIFEST).is_file()]


@cache
def _head_adapter() -> TypeAdapter[_Head]:
    return TypeAdapter(_Head)


def is_sweep(folder: Path) -> bool:
    """Return whether the folder is that of a sweep."""
    return os.path.isfile(folder / "sweep.json")


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


def newest_trained(runs: Sequence[Run], workload: str) -> Run:
    """Return the first run of a workload that has a checkpoint; runs: newest first. Raises RunNotFound."""
    of_workload = [run for run in runs if run.record.workload == workload]
    for run in of_workload:
        if run.record.checkpoints:
            return run
    place = runs[0].where.rpartition("/")[0] if runs else "the folder"
    if of_workload:
        raise RunNotFound(f"no run of {workload} in {place} has a checkpoint yet: train one for an epoch first")
    raise RunNotFound(f"there is no run of {workload} in {place}: train one first (--runs-dir names another folder)")


def fetch_all(runs: Sequence[Run], *patterns: str) -> None:
    """Have files of several runs; see Run.fetch."""
    with ThreadPoolExecutor(8, thread_name_prefix="ddptrain-copies") as pool:
        list(pool.map(lambda run: run.fetch(*patterns), runs))
