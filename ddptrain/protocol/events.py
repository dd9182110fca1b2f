"""Events from a rank to the driver: one JSON object on each line of the rank's events file.

The rank's worker sends the bytes, and the driver decodes them. Times are nanoseconds of the host's wall clock. Unknown
fields are ignored; unknown kinds are refused, so that an incompatible version of ddptrain in a rank is noticed.

A class says what happens to its events: see Event. Ranks only encode, so that they start without pydantic.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from ddptrain.errors import one_line

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_LINE_BYTES = 1 << 20  # a longer line is refused, and never buffered


class EventFormatError(ValueError):
    """The line is not a valid event."""


class Schema:
    """A check of pydantic's for Annotated[...]: the fields of pydantic_core's schema. Needs no import of pydantic."""

    def __init__(self, **schema: object) -> None:
        self.schema = schema

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> dict[str, object]:
        return self.schema


def Between(low: int, high: int) -> Schema:  # noqa: N802  # used as a type's annotation
    """Accepts integers from `low` to `high`; no numbers of other types, and no bool."""
    return Schema(type="int", strict=True, ge=low, le=high)


_Int = Annotated[int, Between(-(2**63), 2**64 - 1)]  # larger ones would not fit into a float
_STRICT = {"strict": True, "extra": "ignore"}  # pydantic's


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; `time_ns` is the time in the rank.

    recorded: events.jsonl and --output json get the event with all its fields, under its kind; the recorder has a
    method of its own for the others. section: `results show` lists the messages of recorded events under this title.
    is_progress: it proves that the rank does not hang. is_number: of several in a row only the newest matters for
    decisions.
    """

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: ClassVar[str] = ""  # its name on the wire and in records
    recorded: ClassVar[bool] = False
    section: ClassVar[str] = ""
    is_progress: ClassVar[bool] = True
    is_number: ClassVar[bool] = False
    time_ns: _Int

    def shown(self) -> tuple[str, str]:
        """The message to the user, after "rank N: ", and its level, "info" or "warning"; the text "" for none."""
        return "", "info"


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The rank's process runs; sent before the process group is up."""

    kind: ClassVar[str] = "started"
    is_progress: ClassVar[bool] = False
    pid: _Int
    host: str
    device: str = "cpu"
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entered(Event):
    """The process group is up and the workload's function is called; or a script begins, which has no group yet."""

    kind: ClassVar[str] = "entered"
    recorded: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Metrics(Event):
    """Numbers that the workload logged (NaN and infinities included), at a step and an epoch."""

    kind: ClassVar[str] = "metrics"
    is_number: ClassVar[bool] = True
    values: Mapping[str, float]
    step: _Int | None = None
    epoch: float | None = None


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """The rank's progress: `done` of `total` (None: unknown), counted in `unit`."""

    kind: ClassVar[str] = "progress"
    is_number: ClassVar[bool] = True
    done: float
    total: float | None = None
    unit: str = "steps"


@dataclass(frozen=True, slots=True)
class Epochs(Event):
    """An epoch begins, counted from 1; the workload trains `total`."""

    kind: ClassVar[str] = "epochs"
    total: _Int
    epoch: _Int = 1


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file in the rank's staging folder that the driver stores in the run directory."""

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    name: str
    size_bytes: _Int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """The files of another rank for a checkpoint, in a folder below that rank's staging folder."""

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    rank: _Int
    staging: str
    files: tuple[StagedFile, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A complete checkpoint waits in `staging` (a folder name below the rank's staging folder).

    metrics: the mean of each over the ranks that gave it. parts: the complete files of the other ranks, for a sharded
    model. finite: whether all weights are finite numbers.
    """

    kind: ClassVar[str] = "checkpoint"
    step: _Int
    staging: str
    files: tuple[StagedFile, ...]
    epoch: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[CheckpointPart, ...] = ()
    finite: bool = True


@dataclass(frozen=True, slots=True)
class FileSaved(Event):
    """A file for `path` below `area` waits in `staging` (a file name below the rank's staging folder)."""

    kind: ClassVar[str] = "file"
    path: str
    staging: str
    size_bytes: _Int
    sha256: str
    area: str = "artifacts"  # a folder of the run directory: "artifacts" or "tracking"


@dataclass(frozen=True, slots=True)
class Failure(Event):
    """The exception that left the user's code.

    phase: "setup" (before the process group), "rendezvous" or "train". exit_code: the argument of sys.exit. lost_peer:
    the rank is a victim that only lost its connection to another rank. timed_out: the rank is a victim that waited in a
    collective operation for a rank that did not join. unwritable: a checkpoint could not be written, so the code is not
    the cause. handled: the exception had not left the code: the rank was stopped in its `except` or `finally` block.
    """

    kind: ClassVar[str] = "failure"
    recorded: ClassVar[bool] = True
    type: str
    message: str
    traceback: str
    phase: str = "train"
    exit_code: _Int | None = None
    lost_peer: bool = False
    timed_out: bool = False
    unwritable: bool = False
    handled: bool = False


@dataclass(frozen=True, slots=True)
class ThreadFailure(Event):
    """An exception has ended a thread of the user's code. The rank continues, and may wait for the thread for ever."""

    kind: ClassVar[str] = "thread_failure"
    is_progress: ClassVar[bool] = False
    recorded: ClassVar[bool] = True
    section: ClassVar[str] = "threads that have ended"
    thread: str
    type: str
    message: str
    traceback: str

    @property
    def error(self) -> str:
        """The exception in one line, as in a traceback: without a colon if it has no message."""
        return ": ".join(filter(None, (one_line(self.type), one_line(self.message))))

    def shown(self) -> tuple[str, str]:
        """A warning."""
        return f"thread {self.thread} has ended with {self.error}; the rank continues", "warning"


@dataclass(frozen=True, slots=True)
class Stacks(Event):
    """The stack of the rank's main thread: `main` has its frames as "file:line function", innermost first.

    sequence: number of collective operations begun in the default group; None if not known. state: "" if the rank has
    written its stacks itself, else as its worker sees it: "stopped" (SIGSTOP), "uninterruptible" (in the kernel) or
    "busy" (in compiled code that stops Python). handles: the exception whose `except` or `finally` block it executes.
    pending: the oldest collective operation that has begun and not ended, "" if none or not known; the main thread may
    wait for it outside of torch.distributed, as in `loss.item()`.
    """

    kind: ClassVar[str] = "stacks"
    is_progress: ClassVar[bool] = False
    main: tuple[str, ...]
    sequence: _Int | None = None
    state: str = ""
    handles: str = ""
    pending: str = ""


@dataclass(frozen=True, slots=True)
class Noticed(Event):
    """The rank itself has received SIGTERM from a batch system or a user: its host is about to stop."""

    kind: ClassVar[str] = "noticed"
    is_progress: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The rank has ended after the agreed step, which has a checkpoint; sent before any clean-up.

    For a script (with step 0): it has ended with exit code 75, which says that it has saved its state itself.
    """

    kind: ClassVar[str] = "preempted"
    step: _Int


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """The return value of rank 0's function, as JSON text of at most 64 kB; not sent for None."""

    kind: ClassVar[str] = "returned"
    value: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The user's function returned, or the script ended: this rank has succeeded, even if its clean-up fails."""

    kind: ClassVar[str] = "finished"
    recorded: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Tracked(Event):
    """What a tracker has created on its server, such as the URL of a run; run.json contains `found`."""

    kind: ClassVar[str] = "tracked"
    is_progress: ClassVar[bool] = False
    tracker: str
    found: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrackerFailed(Event):
    """A tracker has failed."""

    kind: ClassVar[str] = "tracker_failed"
    is_progress: ClassVar[bool] = False
    tracker: str
    message: str


@dataclass(frozen=True, slots=True)
class Finishing(Event):
    """The workload is over, and the rank waits for its trackers, for `timeout_s` at most."""

    kind: ClassVar[str] = "finishing"
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Timed(Event):
    """Rank 0 has just ended an activity other than training steps, such as "checkpoint" or "evaluation"."""

    kind: ClassVar[str] = "timed"
    activity: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Note(Event):
    """A message for the user, of level "info" or "warning"."""

    kind: ClassVar[str] = "note"
    recorded: ClassVar[bool] = True
    section: ClassVar[str] = "messages of ranks"
    message: str
    level: str = "info"

    def shown(self) -> tuple[str, str]:
        """The message as it is."""
        return self.message, "warning" if self.level == "warning" else "info"


@dataclass(frozen=True, slots=True)
class StoppedEarly(Event):
    """Training ends because `metric` has not improved in its last `values` values; `best` was at a step and epoch."""

    kind: ClassVar[str] = "stopped_early"
    recorded: ClassVar[bool] = True
    section: ClassVar[str] = "stopped early"
    metric: str
    best: float
    values: _Int
    step: _Int | None = None
    epoch: float | None = None

    def shown(self) -> tuple[str, str]:
        """Why it ends."""
        at = [f"{name} {value:g}" for name, value in (("epoch", self.epoch), ("step", self.step)) if value is not None]
        where = f" at {', '.join(at)}" if at else ""
        last = (
            f"the last {self.values} values of {one_line(self.metric)} are"
            if self.values > 1
            else (f"the last value of {one_line(self.metric)} is")
        )
        return f"training ends early: {last} no improvement on {self.best:.6g}{where} (stop_early)", "info"


@dataclass(frozen=True, slots=True)
class LossSpike(Event):
    """A value of train/loss is above its band, which ends at `limit`; the driver finds it in rank 0's metrics.

    median: of the last values.
    """

    kind: ClassVar[str] = "loss_spike"
    recorded: ClassVar[bool] = True
    section: ClassVar[str] = "loss spikes"
    value: float
    median: float
    limit: float
    step: _Int | None = None
    epoch: float | None = None

    def shown(self) -> tuple[str, str]:
        """The value and the band."""
        where = "" if self.step is None else f" at step {self.step}"
        band = f"its median before is {self.median:.4g}, and its band ends at {self.limit:.4g}"
        return f"train/loss jumps to {self.value:.4g}{where}: {band}", "warning"


@dataclass(frozen=True, slots=True)
class Alert(Event):
    """A message of ctx.alert; users are notified of it."""

    kind: ClassVar[str] = "alert"
    recorded: ClassVar[bool] = True
    section: ClassVar[str] = "alerts"
    message: str

    def shown(self) -> tuple[str, str]:
        """The message in one line."""
        return one_line(self.message), "warning"


@dataclass(frozen=True, slots=True)
class AsksForLine(Event):
    """The debugged rank waits for a line of the user. Its log has `log_size` bytes, and ends with the prompt."""

    kind: ClassVar[str] = "asks_for_line"
    log_size: _Int


@dataclass(frozen=True, slots=True)
class DebuggerLeft(Event):
    """The code of the debugged rank goes on. quit: where the user has quit the debugger, which ends the run; or ""."""

    kind: ClassVar[str] = "debugger_left"
    quit: str = ""


KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}


def encode(event: Event) -> bytes:
    """Return the event as a line with its newline. Raises EventFormatError if it is longer than MAX_LINE_BYTES."""
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    data = _ENCODER.encode({"event": event.kind, **fields}).encode("utf-8", "replace") + b"\n"
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


# Created once, because that is slow. Half of a surrogate pair becomes "?": pydantic refuses its escape sequence.
_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"), allow_nan=True, ensure_ascii=False)
_BEGINNING = re.compile(rb'\{"event":"(\w+)",')


def decode(line: bytes) -> Event:
    """Return the event in a line. Raises EventFormatError for anything else, because ranks are not trusted."""
    if len(line) > MAX_LINE_BYTES:
        raise EventFormatError(f"line of {len(line)} bytes, over {MAX_LINE_BYTES}")
    try:
        return adapter(_BEGINNING.match(line)[1]).validate_json(line)  # type: ignore[index]
    except (ValueError, KeyError, TypeError) as error:
        raise EventFormatError(f"not an event: {line[:200]!r} ({error})") from error


@functools.cache
def adapter(kind: bytes) -> TypeAdapter[Event]:
    """Return the decoder of a kind of events; its first call builds it, which takes a millisecond."""
    from pydantic import TypeAdapter

    return TypeAdapter(KINDS[kind.decode()])


# --- Frames of a stack ---

FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)")
# Frames in which a rank waits for other ranks, or for its device, which waits for other ranks.
_WAITS = re.compile(r"/torch/(distributed|nn/parallel)/")
_BACKWARD = "_engine_run_backward"
_SYNCHRONIZE = re.compile(r"/torch/cuda/.* (synchronize|wait)$")
_WRAPPERS = frozenset({"wrapper", "wait"})
_CTX_METHOD = re.compile(r"/ddptrain/rank/context\.py:\d+ (prepare|mean|all_finite|rank_zero_first|checkpoint|resume)$")
_LIBRARY_FILE = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|/ddptrain/(rank|worker)/|^<frozen ")


def users_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame of the user's code, or else of any code, as "train.py:41 in load"; "" if none.

    The innermost frame is the first one.
    """
    matches = [match for frame in frames if (match := FRAME.fullmatch(frame)) is not None]
    of_user = [match for match in matches if not _LIBRARY_FILE.search(match["file"])]
    chosen = next(iter(of_user or matches), None)
    if chosen is None:
        return ""
    name = chosen["file"].rpartition("/")[2]
    return f"{name}:{chosen['line']} in {chosen['function']}"


def ctx_method(frames: Sequence[str]) -> str:
    """Return the method that all ranks must call if a stack (innermost frame first) is in one, as "ctx.mean"."""
    matches = [match for frame in frames if (match := _CTX_METHOD.search(frame)) is not None]
    return f"ctx.{matches[-1][1]}" if matches else ""


def waits_in(frames: Sequence[str]) -> str:
    """Return the operation of torch.distributed that a stack (innermost frame first) is in; "" for any other place.

    The innermost frames must be those of torch, because DDP also calls the model.
    """
    names: list[str] = []
    for frame in frames:
        match = FRAME.fullmatch(frame)
        if match is None:
            break
        if not names and match["function"] == _BACKWARD:
            return "backward"
        if not names and _SYNCHRONIZE.search(f"{match['file']} {match['function']}"):
            return "synchronize"
        if not _WAITS.search(match["file"]):
            break
        names.append(match["function"])
    public = [name for name in names if not name.startswith("_") and name not in _WRAPPERS]
    return (public or names or [""])[0].lstrip("_")
