"""What the driver passes to a display, and what displays and kinds of output implement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddptrain.driver.display.log_tail import RankLine
from ddptrain.protocol.events import CheckpointSaved, Metrics, Progress
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
class RankCheckpoint:
    """The rank has written a checkpoint, which is not in the run directory yet."""

    rank: int
    event: CheckpointSaved


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
    | RankCheckpoint
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


class RunDisplay:
    """The display of a run: the terminal, or that of one trial of a sweep. No method waits, except `close`.

    A display inherits from this class. Methods that it does not override do nothing.
    """

    def handle(self, message: Message) -> None:
        """Show the message."""

    def hide(self, ranks: Collection[int]) -> None:
        """Do not show the output of these ranks."""

    def log_grew(self, rank: int | None = None) -> None:
        """Note that a rank's log file has grown; None: any log may have grown."""

    def close(
        self,
        final_sizes: Mapping[int, int] | None = None,
        summary: Sequence[str] = (),
        last_event: Mapping[str, Any] | None = None,
    ) -> None:
        """Show the end of the run, and wait until it is shown."""

    def expect(self, world_size: int, offsets: Mapping[int, int] | None = None) -> None:
        """Set the number of ranks; `offsets`: the bytes of their logs that were shown before."""
        self.handle(WorldSize(world_size, offsets or {}))

    def status(self, text: str, *, announced: bool = False) -> None:
        """Show what the driver waits for; `announced`: a notice says it, so that only a live display shows it."""
        self.handle(DriverStatus(text, announced))

    def notice(self, text: str, level: str = "info") -> None:
        """Show a message of ddptrain itself; level is "info", "warning" or "error"."""
        self.handle(DriverNotice(text, level))

    def event(self, obj: Mapping[str, Any]) -> None:
        """Write an object for readers of JSON lines."""
        self.handle(RawEvent(obj))


class Renderer(Protocol):
    """One kind of output; only the display's thread calls it."""

    redraw_every_s: float  # seconds between two states of a redrawn line

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Show lines that each of these ranks has printed."""

    def handle(self, message: Message) -> None:
        """Handle a message: show it, if this kind of output shows such messages."""

    def refresh(self, now_s: float) -> None:
        """Update the output; called after every round, with a monotonic time."""
