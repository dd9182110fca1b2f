"""What the driver passes to the display, and what each kind of output implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddptrain.driver.display.log_tail import RankLine
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.protocol.worker_notices import SystemSample
from ddptrain.results.run_record import BestRecord


@dataclass(frozen=True, slots=True)
class WorldSize:
    """The number of ranks is known. `offsets`: the bytes of their logs, by rank, that were shown before."""

    world_size: int
    offsets: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankStarted:
    """The rank's process runs."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The rank's process has ended; `stopped`: because the driver stopped it, not because of a failure."""

    rank: int
    ok: bool
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """The rank logged metrics."""

    rank: int
    event: Metrics


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The rank reported progress."""

    rank: int
    event: Progress


@dataclass(frozen=True, slots=True)
class Epochs:
    """The number of epochs of the run is known."""

    total: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The run directory has a new checkpoint since `time_s` (Unix time). `best`: the best one, if a metric decides."""

    step: int
    time_s: float
    best: BestRecord | None = None


@dataclass(frozen=True, slots=True)
class RedrawnLine:
    """The state of an unfinished line that the rank keeps redrawing, as progress bars do; "" once it is finished."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """What the driver currently waits for; `announced`: a notice has said it."""

    text: str
    announced: bool = False


@dataclass(frozen=True, slots=True)
class Silence:
    """For how long a rank has not reported, for a live display; "": all report."""

    text: str


@dataclass(frozen=True, slots=True)
class DriverNotice:
    """A message of ddptrain itself; level is "info", "warning" or "error"."""

    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of ddptrain's own log, which DDPTRAIN_LOG or --verbose turns on."""

    text: str


@dataclass(frozen=True, slots=True)
class RawEvent:
    """An object for readers of JSON lines; the other outputs ignore it."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Closing:
    """The run has ended and all logs have been shown: the end-of-run summary, as lines and as an object."""

    summary: tuple[str, ...]
    last_event: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SystemUse:
    """The use of a host and its ranks was measured."""

    sample: SystemSample


Message = (
    WorldSize
    | RankStarted
    | RankEnded
    | RankMetrics
    | RankProgress
    | Epochs
    | Saved
    | RedrawnLine
    | DriverStatus
    | Silence
    | DriverNotice
    | LogLine
    | RawEvent
    | Closing
    | SystemUse
)


class Renderer(Protocol):
    """One kind of output; only the display's thread calls it."""

    redraw_every_s: float  # seconds between two states of a redrawn line

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Show lines that each of these ranks has printed."""

    def handle(self, message: Message) -> None:
        """Handle a message: show it, if this kind of output shows such messages."""

    def refresh(self, now_s: float) -> None:
        """Update the output; called after every round, with a monotonic time."""
