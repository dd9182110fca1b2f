"""A run: its record with the status as it is now, and its files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from ddptrain.config.wording import shorten
from ddptrain.errors import RunNotFound
from ddptrain.results import ownership
from ddptrain.results.annotations import FILE, Annotations
from ddptrain.results.errors import UnsafePath
from ddptrain.results.layout import (
    ARTIFACTS,
    INCOMING,
    INPUTS,
    LATEST,
    MANIFEST,
    RECORDED,
    TRACKING,
    WANDB,
    checkpoint_folders,
    files_below,
    origin_of,
    step_of,
    valid_run_id,
)
from ddptrain.results.run_record import SWEEP, FailureRecord, RecordError, RunRecord, RunStatus, text_of_time, validator
from ddptrain.results.secure_files import is_own_folder, read_bytes

if TYPE_CHECKING:
    from ddptrain.tracking.wandb_files import RunPart

DRIVER_GONE = "the driver has ended without a result (killed?)"
MODEL = (
    "run.json",
    "config.yaml",
    "artifacts/*.json",
    "inputs/*.json",
)  # what commands read of a run besides its checkpoint
_LOOK_EVERY_S = 0.5
_RUNS = "runs"  # the default folder of runs
_LOG_NAME = re.compile(r"rank-(\d{1,9})\.log")
_NUMBER = re.compile(r"(\d+)")
_ID_TIME = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """What a list of runs needs of each run.json."""

    run_id: str = ""
    kind: str = ""
    started_at: str = ""


class _Below:
    """A descriptor: the path of a file or folder below `root`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: Run, owner: type[Run]) -> Path:
        return run.file(self._name)


class Run:
    """A run of a folder of this machine. Its record is read when it is needed, once: another look is another Run.

    record: of a run that this process writes; by default that of run.json. is_ours: this process holds the lock, so no
    driver is alive.
    """

    def __init__(self, root: Path, record: RunRecord | None = None, *, is_ours: bool = False) -> None:
        self.root = root
        self._given = record
        self._is_ours = is_ours

    # --- Its files ---

    def file(self, name: str) -> Path:
        """Return the path of a file of the run; one of an object store is downloaded if it exists there."""
        return self.root / name

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises OSError."""
        return read_bytes(self.file(name))

    @property
    def is_original(self) -> bool:
        """Whether `root` is the run itself, and not a local copy of a run in an object store."""
        return origin_of(self.root) is None

    @property
    def where(self) -> str:
        """The location of the run, for messages: its folder, or its URL in the store."""
        origin = origin_of(self.root)
        return origin.url if origin is not None else str(self.root)

    @property
    def argument(self) -> str:
        """The argument RUN for a command in the current directory: the run's id, or its directory or URL."""
        if self.is_original and self.root.absolute().parent == Path(_RUNS).absolute():
            return self.root.name
        return shlex.quote(self.where)

    def shown_path(self, path: Path) -> str:
        """Return a path below `root` for messages, as `where` does for `root`."""
        return f"{self.where}/{path.relative_to(self.root).as_posix()}"

    run_json = _Below("run.json")  # the record of the run: see run_record.py
    config_yaml = _Below("config.yaml")  # the resolved configuration, without secrets
    events_jsonl = _Below("events.jsonl")  # all events except log lines
    metrics_jsonl = _Below("metrics.jsonl")  # all logged numbers
    system_jsonl = _Below("system.jsonl")  # the use of hosts, ranks and GPUs
    logs_dir = _Below("logs")  # one log for each rank
    checkpoints_dir = _Below("checkpoints")  # one folder for each checkpoint, and the pointers latest and best
    artifacts_dir = _Below(ARTIFACTS)  # the files that ranks saved
    inputs_dir = _Below(INPUTS)  # what the driver has prepared for the ranks of every attempt
    tracking_dir = _Below(TRACKING)  # one folder for each tracker
    git_diff = _Below("git.diff")  # changes of the code that were not committed, without secrets
    lock_file = _Below("run.lock")  # the driver holds the lock for the life of the run, and touches the file
    driver_log = _Below("driver.log")  # what a detached driver printed
    decision_log = _Below("logs/ddptrain.log")  # ddptrain's own log of the run, for bug reports
    stop_json = _Below(".stop.json")  # a request to stop, until the driver has read it
    scratch_dir = _Below(".scratch")  # files of the embedded cluster, while the run is running

    def area(self, name: str) -> Path:
        """Return the folder of that name if ranks may save files in it. Raises UnsafePath otherwise."""
        if name not in (ARTIFACTS, TRACKING):
            raise UnsafePath(
                f'a rank asked for a file in "{shorten(name)}": it may write to {ARTIFACTS} and {TRACKING}'
            )
        return self.root / name

    def log(self, rank: int) -> Path:
        """Return the log of that rank."""
        return self.file(f"logs/rank-{rank}.log")

    def logs(self) -> dict[int, Path]:
        """Return the paths of the existing logs by rank, in the order of ranks; log(rank) also downloads one."""
        found = ((_LOG_NAME.fullmatch(name), name) for name in self.names_in("logs"))
        return dict(sorted((int(match[1]), self.root / "logs" / name) for match, name in found if match))

    def names_in(self, folder: str) -> dict[str, int]:
        """Return the files below a folder: path from there -> size in bytes."""
        top = self.root / folder
        return {path.relative_to(top).as_posix(): size_bytes for path, size_bytes in files_below(top)}

    def artifacts(self) -> dict[str, int]:
        """Return the files that ranks saved: path below artifacts/ -> size in bytes, in the order of paths."""
        found = sorted(self.names_in(ARTIFACTS).items())
        return {path: size_bytes for path, size_bytes in found if not PurePosixPath(path).name.startswith(INCOMING)}

    # --- Its record ---

    @cached_property
    def _head(self) -> _Head:
        try:
            head = validator(_Head).validate_json(self.read("run.json"))
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
        try:
            text = self.read("run.json")
        except FileNotFoundError:
            if not self.is_sweep:
                raise
            text = _as_run_json(self.read("sweep.json"))
        record = RunRecord.from_json(text)
        if not valid_run_id(record.run_id):  # commands make files of that name
            raise RecordError(f'run_id is "{shorten(record.run_id)}", which cannot be the name of a run')
        return record

    def _has_driver(self, record: RunRecord) -> bool:
        """Return whether the driver of a run whose run.json says `running` is alive."""
        return ownership.is_alive(self.lock_file, record.driver)

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
    def goes_on(self) -> bool:
        """Whether its end is still to come: it is running, or in the queue of a batch system."""
        return self.status in (RunStatus.RUNNING, RunStatus.QUEUED)

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
            return self.record.earlier_s or None  # of a run that was resumed, and waits in a queue
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
            "tracking": self.trackers(),
            "duration_s": None if duration_s is None else round(duration_s, 3),
            "run_dir": self.where,
            "tags": list(annotations.tags),
            "note": annotations.note,
            "problem": self.problem or None,
        }

    def trackers(self) -> dict[str, dict[str, str]]:
        """By tracker (or `wandb/rank_1` for another rank): its id, url, folder and so on, as far as they are known.

        Includes the URLs of W&B runs that were sent afterwards. A W&B run that was created only for sending is called
        `wandb/<its id>`.
        """
        recorded, links = self.record.tracking, {}
        if recorded:
            from ddptrain.tracking.wandb_files import LINKS, links_of  # not for a list of runs, as some below

            with suppress(OSError):
                links = links_of(self.read(f"{RECORDED}/{LINKS}"))
        found = {name: dict(recorded[name]) for name in sorted(recorded, key=_by_number)}
        for about in found.values():
            if about.get("id") in links:
                about.setdefault("url", links[about["id"]])
        others = sorted(links.keys() - {about.get("id") for about in found.values()}, key=_by_number)
        return found | {f"{WANDB}/{run_id}": {"id": run_id, "url": links[run_id]} for run_id in others}

    def wandb_parts(self) -> list[RunPart]:
        """Return the parts of the run's W&B runs, including those in another folder (WANDB_DIR)."""
        from ddptrain.tracking.wandb_files import parts_below, parts_in

        parts = parts_below(self.tracking_dir / WANDB)
        part_ids = {part.run_id for part in parts}
        others = [about for about in self.record.tracking.values() if about.get("id", "") not in {"", *part_ids}]
        for folder in {Path(about["folder"]).parent for about in others if about.get("folder")}:
            parts += [part for part in parts_in(folder) if part.run_id in {about["id"] for about in others}]
        return parts

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
        return any((path / MANIFEST).is_file() for path in checkpoint_folders(self.checkpoints_dir))

    def checkpoint(self, which: str = LATEST) -> Path:
        """Return the folder of a checkpoint: `latest`, `best`, or a name such as step-100.

        If the pointer file or its checkpoint is missing, the newest checkpoint is returned. Raises RunNotFound.
        """
        folders = {step_of(path.name): path for path in self.checkpoints()}
        if not folders:
            why = "its code has not called ctx.checkpoint, or has ended before a save"
            raise RunNotFound(f"run {self.root.name} has no checkpoint: {why}")
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
        return [path for path in checkpoint_folders(self.checkpoints_dir) if (path / MANIFEST).is_file()]


def _as_run_json(sweep_json: bytes) -> bytes:
    """Return the run.json of a sweep of 0.1.0, which has only sweep.json. Raises RecordError."""
    try:
        data = json.loads(sweep_json)
        names = ("name", "status", "exit_code", "started_at", "ended_at", "duration_s")
        return json.dumps({"run_id": data["sweep_id"], "kind": SWEEP, **{name: data[name] for name in names}}).encode()
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RecordError("sweep.json is damaged") from error


def is_sweep(folder: Path) -> bool:
    """Return whether the folder is that of a sweep."""
    return os.path.isfile(folder / "sweep.json")


def _by_number(name: str) -> list[str | int]:
    """Return a sort key: rank_2 comes before rank_10."""
    return [int(part) if part.isdecimal() else part for part in _NUMBER.split(name)]


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
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8, thread_name_prefix="ddptrain-copies") as pool:
        list(pool.map(lambda run: run.fetch(*patterns), runs))
