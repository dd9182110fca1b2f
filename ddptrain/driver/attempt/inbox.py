"""Messages to the attempt. Dask's threads, signal handlers and the artifact thread put theirs into the inbox.

The attempt's loop itself creates Begin, Tick, RankEvent, OutputRead and NotFinite.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from ddptrain.driver.failure.fault import Loss
from ddptrain.errors import DdptrainError
from ddptrain.protocol.events import Event
from ddptrain.protocol.worker_notices import Notice, RankExit


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The Dask task of a rank raised an error: the rank could not be started, or its rank server died."""

    attempt: int
    rank: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The scheduler has lost a worker; `reason` is "" if it is not known."""

    address: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The driver received SIGINT, SIGTERM or SIGHUP."""

    signum: int


@dataclass(frozen=True, slots=True)
class ArtifactStored:
    """A checkpoint (with its step) or another file of a rank is in the run directory."""

    rank: int
    path: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class ArtifactFailed:
    """A checkpoint or a file of a rank could not be stored because of `error`. The run fails if the file is `vital`.

    unreachable: the file could not be read from its worker, so the worker or the network has failed.
    """

    rank: int
    what: str
    error: BaseException
    vital: bool = True
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class ArtifactRetried:
    """A checkpoint or a file could not be stored; there will be another attempt.

    `failure`: the count and the time, as text.
    """

    rank: int
    what: str
    error: BaseException
    failure: str


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A value of a rank is NaN or infinite, and the run must end because of `reason`."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResultsLost:
    """The run directory cannot be written any more: the run must end with `error`."""

    error: DdptrainError


@dataclass(frozen=True, slots=True)
class Begin:
    """The attempt begins."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.

    connected: whether the scheduler can be reached. worker_fault: why a worker process that the driver itself started
    has ended; None if none has. read_until: all messages that had arrived at this time (monotonic seconds) have been
    read; None if that is not known.
    """

    connected: bool = True
    worker_fault: str | None = None
    read_until: float | None = None


@dataclass(frozen=True, slots=True)
class OutputFetched:
    """Missing bytes of a rank's files were fetched from its host, in a thread; `read` completes what needed them."""

    attempt: int
    rank: int
    read: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ReadMark:
    """The loop puts it into an inbox that is never empty: all earlier messages have been read when it is read."""

    put_at: float


@dataclass(frozen=True, slots=True)
class RankEvent:
    """An event that a rank wrote into its events file; metrics and progress: the last one of `count`."""

    rank: int
    event: Event
    count: int = 1


@dataclass(frozen=True, slots=True)
class OutputRead:
    """The events of a rank have been read, as an action requested: up to its exit, or up to its loss.

    error: why its files could not be read, or "".
    """

    rank: int
    ended: RankExit | None = None
    loss: Loss | None = None
    error: str = ""


InboxMessage = (
    Notice
    | TaskFailed
    | WorkerLost
    | SignalReceived
    | ArtifactStored
    | ArtifactFailed
    | ArtifactRetried
    | ResultsLost
    | ReadMark
    | OutputFetched
)
Message = InboxMessage | Begin | Tick | RankEvent | OutputRead | NotFinite
Inbox = queue.SimpleQueue[InboxMessage]
