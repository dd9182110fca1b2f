"""The content of run.json, as frozen dataclasses that older and newer versions can read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Annotated, Any, Self, cast, get_args, get_origin, get_type_hints

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema, to_json

from ddptrain.config.wording import shorten
from ddptrain.errors import one_line
from ddptrain.host_identity import boot_id
from ddptrain.protocol.exec_env import JOB

SCHEMA = 1
_A_DAY_S = 86_400.0
SWEEP = "sweep"  # the kind of a run whose trials are runs below it


ENDED_BY_STOP = "ended by ddptrain stop"


class RunStatus(StrEnum):
    """The status of a run. run.json has one of the first six; readers derive the others."""

    QUEUED = "queued"  # its driver waits in the queue of a batch system, or its ranks for slots that others hold
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    WAITING = "waiting"
    UNREADABLE = "unreadable"


class RecordError(ValueError):
    """The text is not a run.json."""


class _NullAsNaN:
    def __call__(self, value: object) -> object:
        return math.nan if value is None else value

    def __get_pydantic_json_schema__(self, schema: object, handler: object) -> dict[str, object]:
        return {"type": ["number", "null"]}


Number = Annotated[float, _NullAsNaN()]  # NaN, which JSON does not have, is written as null


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One process of an attempt; `exit` is its exit code, minus the signal that killed it, or None if unknown."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    host: str = ""
    pid: int | None = None
    gpu: str | None = None
    exit: int | None = None


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt of a run; `outcome` is None while it is running, else, for example, succeeded or failed.

    failure: the root cause, without its traceback. It continued from the checkpoint of step `resumed_from`, at
    `resumed_epoch`; both are None if it began at the start.
    """

    attempt: int = 1
    started_at: str = ""
    ended_at: str | None = None
    world_size: int = 0
    outcome: str | None = None
    ranks: tuple[RankRecord, ...] = ()
    resumed_from: int | None = None
    resumed_epoch: float | None = None
    failure: FailureRecord | None = None


@dataclass(frozen=True, slots=True)
class NotFiniteRecord:
    """The first value of an attempt that was NaN or infinite: `value` is nan, inf or -inf."""

    rank: int = 0
    metric: str = ""
    value: str = ""
    step: int | None = None
    epoch: float | None = None

    @property
    def description(self) -> str:
        """The record as a line, without its rank."""
        epoch = "" if self.epoch is None else f" in epoch {self.epoch:g}"
        return f"{self.metric} is {self.value}{epoch if self.step is None else f' at step {self.step}'}"


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Why a run did not succeed. `kind` is exception, exit, signal, worker, driver, ...; `log` is the path of a log.

    cause: the same in one line, as the last line of the command has it; root_cause() returns it.
    """

    rank: int | None = None
    host: str = ""
    kind: str = ""
    type: str = ""
    message: str = ""
    traceback: str = ""
    log: str = ""
    cause: str = ""

    @property
    def is_order(self) -> bool:
        """Whether nothing has failed: somebody has asked the run to end."""
        return self.kind in ("preempted", "interrupted")

    @property
    def is_users_order(self) -> bool:
        """Whether a user has asked the run to end, by `ddptrain stop`, Ctrl-C, or by closing the terminal."""
        by_signal = self.kind == "interrupted" and self.type != "SIGTERM"
        return by_signal or (self.is_order and self.message == ENDED_BY_STOP)

    @property
    def summary(self) -> str:
        """Type and message, which may have several lines."""
        return ": ".join(filter(None, (self.type, self.message)))


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """A run that has slots of the cluster; `since` in seconds since 1970."""

    run_id: str = ""
    slots: int = 0
    since: float = 0.0

    @property
    def description(self) -> str:
        """The record as words."""
        noun = "slot" if self.slots == 1 else "slots"
        day = "" if time.time() - self.since < _A_DAY_S else "%d %b "
        return f"{self.run_id} ({self.slots} {noun} since {time.strftime(f'{day}%H:%M UTC', time.gmtime(self.since))})"


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """What a run waits for: so many slots, and who has them; its `place` in the queue: 1 is next, 0: it has none."""

    slots: int = 0
    place: int = 0
    holders: tuple[HolderRecord, ...] = ()

    @property
    def description(self) -> str:
        """The record as words."""
        place = f"number {self.place} in line" if self.place else ""
        held = ", ".join(holder.description for holder in self.holders)
        return ", ".join(filter(None, (place, f"held by {held}" if held else "")))


def root_cause(failure: FailureRecord | None) -> str:
    """Return why a run did not succeed, in one line; "" if it did. Whatever shows or sends a root cause uses this."""
    if failure is None or failure.cause:
        return failure.cause if failure is not None else ""
    line = one_line(failure.summary or failure.kind)  # of an earlier version, or the driver was killed
    return line if failure.rank is None else f"rank {failure.rank} on {failure.host}: {line}"


@dataclass(frozen=True, slots=True)
class GitRecord:
    """The commit that was checked out, and whether tracked files differed from it."""

    commit: str = ""
    dirty: bool = False


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """The project code that was uploaded to workers: the hash of its content, and its size."""

    hash: str = ""
    folder: str = ""
    files: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DriverRecord:
    """The driver process; `boot_id` distinguishes machines of one name, and restarts of a machine."""

    pid: int = 0
    host: str = ""
    boot_id: str = ""

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the record of this process as a driver."""
        return cls(os.getpid(), socket.gethostname(), boot_id())

    @property
    def description(self) -> str:
        """The process, for messages."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job of a batch system in which `starts` drivers of the run have begun.

    state: as the batch system reports it; "" in run.json. id: "" while it is being submitted.
    """

    backend: str = ""
    id: str = ""
    starts: int = 0
    state: str = ""

    @property
    def description(self) -> str:
        """The job, for messages."""
        return f"{self.backend} job {self.id}" if self.id else f"a {self.backend} job"

    @classmethod
    def of_this_process(cls, run_id: str) -> Self | None:
        """Return the job in which this process is a driver of the run; None outside of a job."""
        if (job := cls.submitted(run_id)) is None and (slurm_id := os.environ.get("SLURM_JOB_ID")):
            job = cls("slurm", slurm_id)
        return job

    @classmethod
    def submitted(cls, run_id: str) -> Self | None:
        """Return the job of this process if it was submitted for this run."""
        match os.environ.get(JOB, "").split(" "):
            case [backend, job, run] if run == run_id:
                return cls(backend, job)
        return None


def jobs_with_this(jobs: Sequence[JobRecord], run_id: str) -> tuple[JobRecord, ...]:
    """Return the jobs of a run after a start of its driver by this process."""
    jobs = [each for each in jobs if each.id]
    if (job := JobRecord.of_this_process(run_id)) is None:
        return tuple(jobs)
    same = [each for each in jobs if (each.backend, each.id) == (job.backend, job.id)]
    others = (each for each in jobs if each not in same)
    return (*others, dataclasses.replace(job, starts=1 + sum(each.starts for each in same)))


@dataclass(frozen=True, slots=True)
class EnvironmentValue:
    """A variable of the ranks' environment; `source` is "user" or "ddptrain"."""

    value: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class BestRecord:
    """The best checkpoint so far, and the metric that decides."""

    metric: str = ""
    mode: str = "min"
    value: Number = math.nan
    step: int = 0


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """How far the slowest rank was at `time_s` (seconds since 1970): `done` of `total`, counted in `unit`.

    eta_s: seconds until all is done, at the rate of that time; None if it is not known. ranks: `done` of each rank.
    """

    time_s: float = 0.0
    done: Number = 0.0
    total: float | None = None
    unit: str = ""
    eta_s: float | None = None
    ranks: Mapping[str, Number] = field(default_factory=dict)

    @property
    def share(self) -> str:
        """As "epoch 3/12" or "24 %"; "" if the end is not known."""
        if not self.total:
            return ""
        if self.unit in ("epoch", "epochs"):
            return f"epoch {self.done:g}/{self.total:g}"
        return f"{min(self.done / self.total, 1.0):.0%}".replace("%", " %")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All of run.json. Times are ISO 8601 in UTC; `checkpoints` holds folder names, newest first.

    waiting: a run whose status is running has no ranks now: it waits for its cluster or for slots, or prepares its
    inputs. queued: it waits for slots that others hold. duration_s: of all parts of a resumed run, in seconds;
    earlier_s: the same without the last part, which began at `resumed_at`. params: as in config.yaml; None in records
    of older versions. last_metrics: one value for all ranks, None if it is not finite; see results/metrics.py.
    progress: that of the last attempt.
    """

    schema: int = SCHEMA
    run_id: str = ""
    name: str = ""
    kind: str = ""  # SWEEP, or "" for a training
    workload: str = ""
    status: str = RunStatus.RUNNING
    waiting: bool = False
    queued: QueueRecord | None = None
    exit_code: int | None = None
    started_at: str = ""
    ended_at: str | None = None
    duration_s: float | None = None
    earlier_s: float = 0.0
    resumed_at: str | None = None
    world_size: int = 0
    params: Mapping[str, Any] | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    failure: FailureRecord | None = None
    not_finite: NotFiniteRecord | None = None  # of the last attempt
    git: GitRecord | None = None
    code: CodeRecord | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    rank_environment: Mapping[str, EnvironmentValue] = field(default_factory=dict)
    driver: DriverRecord = field(default_factory=DriverRecord)
    jobs: tuple[JobRecord, ...] = ()  # the last one is the newest
    last_metrics: Mapping[str, float | None] = field(default_factory=dict)
    progress: ProgressRecord | None = None
    time_use_s: Mapping[str, float | None] = field(default_factory=dict)  # by part; see results/time_use.py
    goodput: float | None = None  # the share of training
    best: BestRecord | None = None
    checkpoints: tuple[str, ...] = ()
    tracking: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by tracker: its url, id, ...
    result: Any = None  # what rank 0's function returned: JSON

    @property
    def failed_attempts(self) -> list[tuple[str, str]]:
        """The root causes of the attempts that were followed by another one, by "attempt 1" and so on."""
        failed = [(attempt.attempt, attempt.failure) for attempt in self.attempts[:-1]]
        return [(f"attempt {number}", root_cause(failure)) for number, failure in failed if failure is not None]

    @property
    def status_text(self) -> str:
        """The status for people."""
        return status_text(self.status, self.failure, self.checkpoints)

    @property
    def numbers(self) -> dict[str, float]:
        """The last metrics by name; NaN for a value that is not finite, which JSON does not have."""
        return {name: math.nan if value is None else value for name, value in sorted(self.last_metrics.items())}

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON data; a number that is not finite becomes null."""
        return cast(dict[str, Any], as_json_data(self))

    def to_json(self) -> str:
        """Return the text of run.json."""
        return ascii_json(self.as_dict(), indent=2).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse a run.json; unknown fields are ignored. Raises RecordError if a field has another type."""
        try:
            record = validator(RunRecord).validate_json(text)
        except ValueError as error:
            first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"msg": str(error)}
            place = ".".join(map(str, first.get("loc", ())))
            why = first["msg"].replace("Invalid JSON", "not JSON")
            raise RecordError(shorten(f"{place}: {why}" if place else why, 200)) from error
        if not record.run_id:
            raise RecordError("run_id is missing")
        return cast(Self, record)


@cache
def validator(kind: type) -> SchemaValidator:
    """Return pydantic's validator of a dataclass: as pydantic.TypeAdapter, whose import and schema take 0.1 s."""
    return SchemaValidator(_schema(kind))


def _schema(kind: Any) -> CoreSchema:
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints, fields = get_type_hints(kind, include_extras=True), []
        for each in dataclasses.fields(kind):
            default: Any = {"default_factory": each.default_factory}
            if each.default_factory is dataclasses.MISSING:
                default = {"default": each.default}
            schema = core_schema.with_default_schema(_schema(hints[each.name]), **default)
            fields.append(core_schema.dataclass_field(each.name, schema))
        arguments = core_schema.dataclass_args_schema(kind.__name__, fields)
        return core_schema.dataclass_schema(kind, arguments, [each["name"] for each in fields], slots=True, frozen=True)
    if origin is Annotated:
        return core_schema.no_info_before_validator_function(args[1], _schema(args[0]))
    if NoneType in args:
        return core_schema.nullable_schema(_schema(args[0]))
    if origin is tuple:
        return core_schema.tuple_schema([_schema(args[0])], variadic_item_index=0)
    if origin is Mapping:
        return core_schema.dict_schema(_schema(args[0]), _schema(args[1]))
    plain = {str: "str", int: "int", float: "float", bool: "bool", Any: "any"}
    return cast(CoreSchema, {"type": plain[kind]})


def status_text(status: str, failure: FailureRecord | None, checkpoints: Sequence[str]) -> str:
    """Return a status for people: "stopped (saved)" if a user has ended the run, and it has a checkpoint."""
    if failure is None or not failure.is_users_order:
        return str(status)
    return "stopped (saved)" if checkpoints else "stopped"


def as_json_data(value: object) -> object:
    """Return the value as strict JSON data: NaN and infinities become null, other objects become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json_data(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def ascii_json(value: object, indent: int | None = None) -> bytes:
    """Return the value as strict JSON, as as_json_data() does, in ASCII: some readers take U+2028 for a line's end.

    Nearly all values are encoded by a library that is several times as fast as json; a run with many ranks has
    thousands in a second.
    """
    with suppress(ValueError):  # an object that is no JSON, or half of a surrogate pair
        if (data := to_json(value, indent=indent, inf_nan_mode="null")).isascii():
            return data
    separators = None if indent else (",", ":")
    return json.dumps(as_json_data(value), indent=indent, allow_nan=False, separators=separators).encode()


def utc_now() -> str:
    """Return the time now as records have it."""
    return text_of_time(datetime.now(UTC))


def text_of_time(moment: datetime) -> str:
    """Return a time as records have it: ISO 8601, UTC, milliseconds."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
