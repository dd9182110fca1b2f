"""Messages from a worker to the driver about one rank, and the one encoder and decoder for them.

They are sent as events of a Dask topic: dictionaries of plain values, which the scheduler keeps. Every client of the
scheduler may send such events, so decode() raises NoticeError for anything that is not a valid notice.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

MAX_DATA_BYTES = 16 * 1024  # in one message: the scheduler keeps the last thousand messages of a topic
_NOTICE_BYTES = 100  # approximate size of a notice without data
_MAX_COUNT = 1 << 50  # the limit of sizes, offsets, ranks and attempts; a higher value is an error or an attack
_MAX_TIME_NS = 1 << 63
_MAX_TEXT = 4_096  # characters
_MAX_PORT = 65_535
_MAX_STATUS = 255
_MAX_HOST = 255  # characters
MAX_SAMPLED_RANKS = 32  # in one SystemSample
HOST_METRICS = {
    "cpu_percent": "use of all cores together; 100 is all of them",
    "memory_bytes": "memory that cannot be given to a new process",
    "memory_total_bytes": "memory of the host",
    "disk_bytes_s": "read and written, all disks",
    "network_bytes_s": "received and sent, all interfaces but the loopback",
}
RANK_METRICS = {
    "cpu_percent": "CPU use of the rank and its children; 100 is one core",
    "rss_bytes": "resident memory of the rank and its children; shared pages count for each of them",
    "processes": "the rank and its children",
    "gpu_percent": "time in which a kernel ran",
    "gpu_memory_bytes": "used memory of the GPU",
    "gpu_memory_total_bytes": "memory of the GPU",
    "gpu_power_w": "power",
    "gpu_temperature_c": "temperature",
    "gpu_throttle": "NVML's bits of the reasons why the clock is reduced",
}
# NVML's reasons for a reduced clock that mean a problem. Idle, a clock set by the user, and sync boost are none.
THROTTLE_REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}


class NoticeError(ValueError):
    """The message is not a valid notice."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Base of all notices; `attempt` and `rank` name the process that the notice is about."""

    kind: ClassVar[str] = ""
    attempt: int
    rank: int


@dataclass(frozen=True, slots=True)
class Alive(Notice):
    """The rank is silent, but its worker is reachable. None: the value is not known.

    cpu_s: CPU time of the rank and its children since their start. gpu_percent: use of the rank's GPU.
    """

    kind: ClassVar[str] = "alive"
    cpu_s: float | None = None
    gpu_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Leaving(Notice):
    """The worker has received SIGTERM: its host is about to stop."""

    kind: ClassVar[str] = "leaving"


@dataclass(frozen=True, slots=True)
class StoreOpened(Notice):
    """Rank 0's worker hosts the TCPStore on this port; the other ranks can start."""

    kind: ClassVar[str] = "store_opened"
    port: int


@dataclass(frozen=True, slots=True)
class Growth(Notice):
    """How many bytes the rank has written to its log and to its events file."""

    kind: ClassVar[str] = "growth"
    log_size: int
    events_size: int


@dataclass(frozen=True, slots=True)
class OutputBytes(Notice):
    """Bytes of the rank's log or events file, for a driver that does not share the worker's file system."""

    kind: ClassVar[str] = "output"
    stream: str  # "log" or "events"
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RankExit(Notice):
    """The rank's process ended: `status` is its exit code, or minus the signal that killed it.

    log_size, events_size: bytes that the rank wrote in total. timed_out: the process was aborted because a collective
    operation did not end. lost_peer: it was aborted because another rank has ended. reason: "", or of a SIGKILL why
    the kernel sent it, a text that begins with "out of memory" or "likely out of memory"; of a crash (SIGSEGV, SIGABRT
    and others) the C++ exception and the user's frame, if they are known; of an exit code why the rank could not report
    its failure.
    """

    kind: ClassVar[str] = "exit"
    pid: int
    status: int
    time_ns: int
    log_size: int
    events_size: int
    reason: str = ""
    timed_out: bool = False
    lost_peer: bool = False

    @property
    def text(self) -> str:
        """The status as text: `exit code 1`, `killed by SIGSEGV`, with the reason."""
        return describe_status(self.status) + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class SystemSample(Notice):
    """The resource use of a host and of ranks on it, which a worker measured at `time_ns`; `rank` is one of the ranks.

    use: the host's metrics by name, see docs/output.md. ranks: the metrics of each rank, by its number as
    text.
    """

    kind: ClassVar[str] = "system"
    time_ns: int
    host: str
    use: Mapping[str, float]
    ranks: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Broken(Notice):
    """The rank could not be started, or its rank server has ended. No further notice about the rank will follow."""

    kind: ClassVar[str] = "broken"
    message: str


def describe_status(status: int) -> str:
    """Return the text for an exit code, or for a signal (a negative number)."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


KINDS: dict[str, type[Notice]] = {
    cls.kind: cls for cls in (Alive, Leaving, StoreOpened, Growth, OutputBytes, RankExit, Broken, SystemSample)
}


def encode(notice: Notice) -> dict[str, Any]:
    """Return the notice as plain values for MessagePack (OutputBytes has bytes) or JSON (all others)."""
    return {"notice": notice.kind, **{name: getattr(notice, name) for name in notice.__dataclass_fields__}}


def encode_all(notices: Sequence[Notice]) -> dict[str, Any]:
    """Return several notices as one message."""
    return {"notices": [encode(notice) for notice in notices]}


def size_bytes(notice: Notice) -> int:
    """Return about how many bytes a notice adds to a message."""
    return _NOTICE_BYTES + (len(notice.data) if isinstance(notice, OutputBytes) else 0)


def decode_all(message: object) -> Iterator[Notice | NoticeError]:
    """Yield the notices of a message; for an invalid notice, its error."""
    several = message.get("notices") if isinstance(message, Mapping) else None
    for one in several if isinstance(several, list | tuple) else [message]:
        try:
            yield decode(one)
        except NoticeError as error:
            yield error


def decode(message: object) -> Notice:
    """Return the notice in a message; unknown fields are ignored. Raises NoticeError if the message is not valid."""
    if not isinstance(message, Mapping):
        raise NoticeError(f"the message is not a mapping but {_quoted(message)}")
    kind = message.get("notice")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise NoticeError(f"unknown kind {_quoted(kind)}")
    values = []
    for name, check, default in _FIELDS[cls.kind]:
        value = message.get(name, default)
        if value is MISSING or not check(value):
            raise NoticeError(f"{cls.kind}: {name} is {'missing' if value is MISSING else _quoted(value)}")
        values.append(value)
    return cls(*values)


def exit_to_json(ended: RankExit) -> str:
    """Encode the notice that a rank's Dask task returns as its result."""
    return json.dumps(encode(ended))


def exit_from_json(text: str) -> RankExit:
    """Decode the result of a rank's Dask task. Raises NoticeError if the text is not a RankExit."""
    try:
        notice = decode(json.loads(text))
    except RecursionError as error:
        raise NoticeError("the text is nested too deeply") from error
    except ValueError as error:
        raise NoticeError(str(error)) from error
    if not isinstance(notice, RankExit):
        raise NoticeError(f"not an exit but {notice.kind}")
    return notice


def _quoted(value: object) -> str:
    """Return the value's type; of a text or number also its value. repr() of a nested value could be huge or fail."""
    shown = f" {value!r:.60}" if isinstance(value, str | float | bool) else ""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_TIME_NS:
        shown = f" {value}"
    return f"a value of type {type(value).__name__}{shown}"


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # bool is a subclass of int


def _is_count(value: object) -> bool:
    return _is_int(value, 0, _MAX_COUNT)


def _is_amount(value: object) -> bool:
    """Return whether the value is None or a finite number that is not negative."""
    if value is None:
        return True
    if type(value) is float:
        return math.isfinite(value) and value >= 0.0
    return _is_count(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_sample(value: object, names: Collection[str]) -> bool:
    """Return whether the value maps known names to finite numbers."""
    if not isinstance(value, Mapping) or len(value) > len(names):
        return False
    return all(isinstance(name, str) and name in names and _is_number(item) for name, item in value.items())


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_TIME_NS  # type: ignore[arg-type]  # false for NaN


def _are_ranks(value: object) -> bool:
    if not isinstance(value, Mapping) or len(value) > MAX_SAMPLED_RANKS:
        return False
    return all(isinstance(rank, str) and rank.isdecimal() and len(rank) < 10 for rank in value) and all(
        _is_sample(sample, RANK_METRICS) for sample in value.values()
    )


_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "attempt": lambda value: _is_int(value, 1, _MAX_COUNT),
    "rank": _is_count,
    "cpu_s": _is_amount,
    "gpu_percent": _is_amount,
    "port": lambda value: _is_int(value, 1, _MAX_PORT),
    "log_size": _is_count,
    "events_size": _is_count,
    "stream": lambda value: isinstance(value, str) and value in ("log", "events"),
    "offset": _is_count,
    "data": lambda value: isinstance(value, bytes) and len(value) <= MAX_DATA_BYTES,
    "pid": _is_count,
    "status": lambda value: _is_int(value, -_MAX_STATUS, _MAX_STATUS),
    "time_ns": lambda value: _is_int(value, 0, _MAX_TIME_NS),
    "reason": _is_text,
    "host": lambda value: isinstance(value, str) and len(value) <= _MAX_HOST,
    "use": lambda value: _is_sample(value, HOST_METRICS),
    "ranks": _are_ranks,
    "message": _is_text,
    "timed_out": lambda value: isinstance(value, bool),
    "lost_peer": lambda value: isinstance(value, bool),
}
_FIELDS = {
    kind: tuple((field.name, _CHECKS[field.name], field.default) for field in fields(cls))
    for kind, cls in KINDS.items()
}


def throttle_reasons(bits: float) -> list[str]:
    """Return the texts of the reasons in a value of gpu_throttle (bits)."""
    return [text for bit, text in THROTTLE_REASONS.items() if int(bits) & bit]
