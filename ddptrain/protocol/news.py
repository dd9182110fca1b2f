"""News: what a worker tells the driver about the ranks of an attempt, one message for each worker and interval.

They are events of a Dask topic: dictionaries of plain values, of which the scheduler keeps the last thousand. Every
client of the scheduler may send such events, so decode() raises NewsError for anything that is not valid. Workers only
encode, so that they start without pydantic.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ddptrain.protocol.events import Between, Schema

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_DATA_BYTES = 16 * 1024  # in one message
MAX_SAMPLED_RANKS = 32  # in one sample
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

_Count = Annotated[int, Between(0, 1 << 50)]  # a higher value is an error or an attack
_Time = Annotated[int, Between(0, 1 << 63)]
_Amount = Annotated[float, Schema(type="float", ge=0, allow_inf_nan=False)]
_Data = Annotated[bytes, Schema(type="bytes", strict=True, max_length=MAX_DATA_BYTES)]
_Text = Annotated[str, Schema(type="str", strict=True, max_length=4_096)]


def _numbers(names: Mapping[str, str]) -> Schema:
    """Accepts finite numbers with these names."""
    keys, values = {"type": "literal", "expected": list(names)}, {"type": "float", "allow_inf_nan": False}
    return Schema(type="dict", keys_schema=keys, values_schema=values)


class NewsError(ValueError):
    """The message is not valid."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """The rank's process ended: `status` is its exit code, or minus the signal that killed it.

    timed_out: the process was aborted because a collective operation did not end. lost_peer: it was aborted because
    another rank has ended. reason: "" if unknown, else of a SIGKILL that it was out of memory; of a crash (SIGSEGV,
    SIGABRT and others) the C++ exception and the user's frame; of an exit code why the rank has reported no failure.
    """

    pid: _Count
    status: Annotated[int, Between(-255, 255)]
    time_ns: _Time
    reason: _Text = ""
    timed_out: bool = False
    lost_peer: bool = False

    @property
    def text(self) -> str:
        """The status as text: `exit code 1`, `killed by SIGSEGV`, with the reason."""
        return describe_status(self.status) + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class RankNews:
    """What is new of a rank.

    log_size, events_size: bytes that it has written to its log and to its events file. log, events: their last bytes,
    for a driver that does not share the worker's file system; the driver fetches those that are missing before.
    cpu_s: CPU time of the rank and its children since their start, and gpu_percent: use of the rank's GPU; None if not
    measured now. broken: why the rank could not be started, or that its rank server has ended: no more will follow.
    """

    rank: _Count
    log_size: _Count = 0
    events_size: _Count = 0
    log: _Data = b""
    events: _Data = b""
    cpu_s: _Amount | None = None
    gpu_percent: _Amount | None = None
    ended: RankExit | None = None
    broken: _Text = ""

    @property
    def size_bytes(self) -> int:
        """About how many bytes it adds to a message."""
        return _HEAD_BYTES + len(self.log) + len(self.events)


_HEAD_BYTES = 150


@dataclass(frozen=True, slots=True)
class SystemSample:
    """The resource use of a host and of ranks on it, which a worker measured at `time_ns`; `rank` is one of the ranks.

    use: the host's metrics by name, see docs/output.md. ranks: the metrics of each rank, by its number as text.
    """

    rank: _Count
    time_ns: _Time
    host: Annotated[str, Schema(type="str", strict=True, max_length=255)]
    use: Annotated[Mapping[str, float], _numbers(HOST_METRICS)]
    ranks: Mapping[
        Annotated[str, Schema(type="str", pattern=r"^[0-9]{1,9}$")],
        Annotated[Mapping[str, float], _numbers(RANK_METRICS)],
    ]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A record of the worker for ddptrain's own log, about a rank."""

    rank: _Count
    text: _Text


@dataclass(frozen=True, slots=True)
class News:
    """A message of a worker about an attempt; every message shows that the worker, and the way from it, are alive.

    ranks: those of which something is new. store_port: rank 0's worker hosts the TCPStore on this port, so the other
    ranks can start. leaving: the worker has received SIGTERM: its host is about to stop. worker: its address in Dask,
    which the scheduler adds. log: what the worker has decided.
    """

    __pydantic_config__: ClassVar[Mapping[str, object]] = {"extra": "ignore"}
    attempt: Annotated[int, Between(1, 1 << 50)]
    ranks: tuple[RankNews, ...] = ()
    store_port: Annotated[int, Between(0, 65_535)] = 0
    leaving: bool = False
    sample: SystemSample | None = None
    log: tuple[LogLine, ...] = ()
    worker: _Text = ""


def describe_status(status: int) -> str:
    """Return the text for an exit code, or for a signal (a negative number)."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def encode(news: News) -> dict[str, Any]:
    """Return the message as plain values for MessagePack, without fields that have their default."""
    return {"news": _plain(news)}


def _plain(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_plain(each) for each in part]
    if not dataclasses.is_dataclass(part):
        return part
    fields = {name: (getattr(part, name), field.default) for name, field in part.__dataclass_fields__.items()}
    return {name: _plain(value) for name, (value, default) in fields.items() if value != default}


def decode(message: object) -> News:
    """Return the news in a message; unknown fields are ignored. Raises NewsError if the message is not valid."""
    from pydantic import ValidationError

    try:
        news = message["news"]  # type: ignore[index]
        return adapter().validate_python({**news, "worker": message["worker"]})  # type: ignore[index]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise NewsError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (TypeError, KeyError):
        raise NewsError("the message is not news of a worker") from None


@functools.cache
def adapter() -> TypeAdapter[News]:
    """Return the decoder; its first call builds it, which takes some milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(News)


def throttle_reasons(bits: float) -> list[str]:
    """Return the texts of the reasons in a value of gpu_throttle (bits)."""
    return [text for bit, text in THROTTLE_REASONS.items() if int(bits) & bit]
