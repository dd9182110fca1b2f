"""The wire contract: what a rank tells, one JSON object a line, on a descriptor of its own.

A rank appends these lines to its events file; its worker forwards the bytes; the driver decodes them. Times are
nanoseconds of the host's wall clock. Unknown fields are ignored and unknown kinds refused, so that a newer rank
never confuses an older driver silently.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

MAX_LINE_BYTES = 1 << 20  # a longer line is a rank gone wrong: refused, never buffered


class EventFormatError(ValueError):
    """A line that is not an event of this contract."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; `time_ns` is when it happened in the rank."""

    kind: ClassVar[str] = ""
    time_ns: int


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The rank's process runs; sent before the process group is up."""

    kind: ClassVar[str] = "started"
    pid: int
    host: str
    device: str = "cpu"
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entered(Event):
    """The process group is up and the workload's function is being called, or a script begins, which has none yet."""

    kind: ClassVar[str] = "entered"


@dataclass(frozen=True, slots=True)
class Metrics(Event):
    """Numbers that the workload logged (NaN and infinities included), at a step and an epoch."""

    kind: ClassVar[str] = "metrics"
    values: Mapping[str, float]
    step: int | None = None
    epoch: float | None = None


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """How far the rank is: `done` of `total` (None: unknown), counted in `unit`."""

    kind: ClassVar[str] = "progress"
    done: float
    total: float | None = None
    unit: str = "steps"


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that the rank left in its staging folder for the driver to bring home."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A complete checkpoint waits in `staging` (a folder name below the rank's staging folder)."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    staging: str
    files: tuple[StagedFile, ...]
    epoch: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileSaved(Event):
    """A file for `path` below `area` waits in `staging` (a file name below the rank's staging folder)."""

    kind: ClassVar[str] = "file"
    path: str
    staging: str
    size_bytes: int
    sha256: str
    area: str = "artifacts"  # a folder of the run directory: that, or "tracking"


@dataclass(frozen=True, slots=True)
class Failure(Event):
    """The exception that left the user's code, written before any clean-up ran.

    `phase` is where: "setup" (before the process group), "rendezvous", "train". `exit_code` is set for sys.exit.
    `lost_peer` marks the error of a rank that only lost its connection to another: a victim, not a cause. So does
    `timed_out`: the rank has waited in a collective operation for one that did not come.
    """

    kind: ClassVar[str] = "failure"
    type: str
    message: str
    traceback: str
    phase: str = "train"
    exit_code: int | None = None
    lost_peer: bool = False
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written: `failures` times in a row; `given_up` says that no further try follows."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    message: str
    failures: int
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class ThreadFailure(Event):
    """An exception has ended a thread of the user's; the rank goes on, and may wait for that thread for ever."""

    kind: ClassVar[str] = "thread_failure"
    thread: str
    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Stacks(Event):
    """Where the rank's main thread is: `main` holds its frames as "file:line function", innermost first.

    `sequence` is how many collective operations it has begun in the default group, None where that is not known.
    `state` is empty where the rank has answered itself, else what its worker says of it: "stopped" (SIGSTOP),
    "uninterruptible" (in the kernel), or "busy" (in compiled code that does not let Python run). `calls` counts the
    calls of ctx methods that all ranks must make; `waits` is the one in which the rank waits for others, at a step.
    """

    kind: ClassVar[str] = "stacks"
    main: tuple[str, ...]
    sequence: int | None = None
    state: str = ""
    calls: Mapping[str, float] = field(default_factory=dict)
    waits: str = ""
    waits_step: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The rank has waited for others for some seconds in a ctx method that all ranks must call."""

    kind: ClassVar[str] = "waiting"
    call: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Noticed(Event):
    """The rank itself was sent SIGTERM: its host is about to go (a batch system, or a person, says so)."""

    kind: ClassVar[str] = "noticed"


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The rank has ended at the step that all ranks agreed on, with a checkpoint of it; written before clean-up.

    Of a script (with step 0) it says that it has ended with exit code 75: it has seen to its state itself.
    """

    kind: ClassVar[str] = "preempted"
    step: int


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """What rank 0's function returned, as JSON text of at most 64 kB; nothing is sent for None."""

    kind: ClassVar[str] = "returned"
    value: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The user's function returned, or the script ended: this rank has succeeded, whatever its clean-up does.

    `calls` counts its calls of ctx methods that all ranks must make.
    """

    kind: ClassVar[str] = "finished"
    calls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tracked(Event):
    """What a tracker has made elsewhere, such as a run's url: for run.json."""

    kind: ClassVar[str] = "tracked"
    tracker: str
    found: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrackerFailed(Event):
    """A tracker has failed; where the configuration says `tracking.strict`, the run fails of it at its end."""

    kind: ClassVar[str] = "tracker_failed"
    tracker: str
    message: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Finishing(Event):
    """The workload is over, and the rank waits for its trackers: it is quiet for `timeout_s` at the most."""

    kind: ClassVar[str] = "finishing"
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Note(Event):
    """Something the person should know, of level "info" or "warning"."""

    kind: ClassVar[str] = "note"
    message: str
    level: str = "info"


KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        Started,
        Entered,
        Metrics,
        Progress,
        CheckpointSaved,
        CheckpointFailed,
        FileSaved,
        Failure,
        ThreadFailure,
        Stacks,
        Waiting,
        Noticed,
        Preempted,
        Returned,
        Finished,
        Tracked,
        TrackerFailed,
        Finishing,
        Note,
    )
}


def encode(event: Event) -> bytes:
    """One line, newline included. Raises EventFormatError if it would be longer than MAX_LINE_BYTES."""
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    line = _ENCODER.encode({"event": event.kind, **fields})
    data = line.encode("utf-8", "backslashreplace") + b"\n"
    if len(data) > MAX_LINE_BYTES:
        raise EventFormatError(
            f"event {event.kind!r} is {len(data)} bytes long, over {MAX_LINE_BYTES}; send a file instead"
        )
    return data


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"), allow_nan=True)  # made once: it costs as a call


def decode(line: bytes) -> Event:
    """The event that a line holds. Raises EventFormatError for anything else: a rank is not trusted."""
    if len(line) > MAX_LINE_BYTES:
        raise EventFormatError(f"line of {len(line)} bytes, over {MAX_LINE_BYTES}")
    try:
        raw = json.loads(line)
        cls = KINDS[raw.pop("event")]
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {key: value for key, value in raw.items() if key in known}
        return _checked(cls, fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EventFormatError(f"not an event: {line[:200]!r} ({error})") from error


def _checked(cls: type[Event], fields: dict[str, Any]) -> Event:
    if "files" in fields:
        fields["files"] = tuple(StagedFile(**_typed(StagedFile, item)) for item in fields["files"])
    if cls is Stacks and isinstance(frames := fields.get("main"), list):
        fields["main"] = tuple(str(frame) for frame in frames)
    return cls(**_typed(cls, fields))


def _typed(cls: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Refuse fields whose JSON type is not the declared one."""
    for spec in dataclasses.fields(cls):
        if spec.name in fields and not _fits(str(spec.type), fields[spec.name]):
            raise TypeError(f"{spec.name} is {fields[spec.name]!r}, not {spec.type}")
    return fields


def _fits(declared: str, value: Any) -> bool:
    if value is None:
        return declared.endswith("| None")
    if declared.startswith("int"):
        return isinstance(value, int) and not isinstance(value, bool)
    if declared.startswith("float"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if declared.startswith("bool"):
        return isinstance(value, bool)
    if declared.startswith("str"):
        return isinstance(value, str)
    if declared == "Mapping[str, float]":
        return isinstance(value, dict) and all(_fits("float", item) for item in value.values())
    if declared == "Mapping[str, str]":
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return isinstance(value, dict | tuple)
