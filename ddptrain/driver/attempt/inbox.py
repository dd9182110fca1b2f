"""Messages to the attempt. Those of Dask's threads, signal handlers and the artifact thread come through the inbox.

The attempt's own loop adds what it has read or looked up: Begin, Tick, RankEvent and OutputRead.
"""

from __future__ import annotations

import queue
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
    """The scheduler has lost a worker, for `reason` if that is known."""

    address: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The driver received SIGINT, SIGTERM or SIGHUP."""

    signum: int


@dataclass(frozen=True, slots=True)
class ArtifactStored:
    """A checkpoint or a file of a rank is in the run directory."""

    rank: int
    what: str
    path: str


@dataclass(frozen=True, slots=True)
class ArtifactFailed:
    """A checkpoint or a file of a rank could not be stored, for `error`. The run fails if it is `vital`.

    unreachable: it could not be read from its worker, so it was the worker or the network that failed.
    """

    rank: int
    what: str
    error: BaseException
    vital: bool = True
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class ArtifactRetried:
    """A checkpoint or a file could not be stored; another try follows. `failure` says how often and when."""

    rank: int
    what: str
    error: BaseException
    failure: str


@dataclass(frozen=True, slots=True)
class ResultsLost:
    """The run directory cannot be written any more: the run has to end with `error`."""

    error: DdptrainError


@dataclass(frozen=True, slots=True)
class SpareSlots:
    """Whether slots on other hosts are free for these slow ranks. They will be avoided by the next reservation."""

    ranks: tuple[int, ...]
    found: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """The attempt begins."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.

    connected: whether the scheduler can be reached. worker_fault: why a worker process that the driver itself started
    has ended. all_read: no message waits in the inbox.
    """

    connected: bool = True
    worker_fault: str | None = None
    all_read: bool = True


@dataclass(frozen=True, slots=True)
class RankEvent:
    """An event that a rank wrote into its events file."""

    rank: int
    event: Event


@dataclass(frozen=True, slots=True)
class OutputRead:
    """The events of a rank have been read, as an action asked for: up to its exit, or to its loss.

    error: why its files could not be read.
    """

    rank: int
    ended: RankExit | None = None
    loss: Loss | None = None
    error: str = ""


InboxMessage = (
    Notice | TaskFailed | WorkerLost | SignalReceived | ArtifactStored | ArtifactFailed | ArtifactRetried | ResultsLost
)
Message = InboxMessage | Begin | Tick | RankEvent | OutputRead | SpareSlots
Inbox = queue.SimpleQueue[InboxMessage]
