"""What the driver tells the display, and what each kind of output must be able to do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ddptrain.driver.display.lines import Line
from ddptrain.protocol.events import Metrics, Progress


@dataclass(frozen=True, slots=True)
class Expected:
    """So many ranks there will be."""

    world_size: int


@dataclass(frozen=True, slots=True)
class RankStarted:
    """The rank's process runs."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The rank's process has ended."""

    rank: int
    ok: bool
    stopped: bool = False  # it was told to end, and so is no fault


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """The rank logged numbers."""

    rank: int
    event: Metrics


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The rank got on."""

    rank: int
    event: Progress


@dataclass(frozen=True, slots=True)
class Redrawn:
    """The state of an unfinished line that the rank keeps redrawing; "" once it is finished."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """What is being waited for."""

    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that ddptrain itself has to say; level is "info", "warning" or "error"."""

    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True)
class RawEvent:
    """An object for the readers of JSON lines."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Closing:
    """The run is over and all logs have been shown: say how it went."""

    summary: tuple[str, ...]
    last_event: Mapping[str, Any]


Message = (
    Expected | RankStarted | RankEnded | RankMetrics | RankProgress | Redrawn | Status | Notice | RawEvent | Closing
)


class Renderer(Protocol):
    """One kind of output; called from the display's thread only."""

    redraw_every_s: float  # how often the state of a redrawn line is wanted

    def log(self, rank: int, lines: Sequence[Line]) -> None:
        """Show lines that the rank printed."""

    def tell(self, message: Message) -> None:
        """Take a message in, and show it if this output does."""

    def refresh(self, now_s: float) -> None:
        """Bring the output up to date; called after every round, with a monotonic time."""
