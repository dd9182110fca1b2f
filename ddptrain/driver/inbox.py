"""Messages to the attempt. Dask's threads, signal handlers and the transfer thread put theirs into the inbox."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ddptrain.errors import DdptrainError
from ddptrain.protocol.news import News


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


class Request(StrEnum):
    """What a signal to the driver asks for."""

    END = "end"  # save and end; the second stops the ranks, the third kills them
    STOP_NOW = "stop now"  # kill the ranks
    FORWARD = "forward"  # nothing: the ranks get the signal
    BREAK = "break"  # nothing: it opens the debugger


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The driver received a signal."""

    signum: int
    request: Request = Request.END


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
    """A checkpoint or a file could not be stored; there will be another try. `failure`: the count and the time."""

    rank: int
    what: str
    error: BaseException
    failure: str


@dataclass(frozen=True, slots=True)
class ResultsLost:
    """The run directory cannot be written any more: the run must end with `error`."""

    error: DdptrainError


@dataclass(frozen=True, slots=True)
class OutputFetched:
    """Missing bytes of a rank's files were fetched from its host, in a thread; `read` completes what needed them."""

    attempt: int
    read: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LineTyped:
    """The user has typed a line for the debugger, with its newline; "" is the end of the input."""

    text: str


Message = (
    News
    | TaskFailed
    | WorkerLost
    | SignalReceived
    | ArtifactStored
    | ArtifactFailed
    | ArtifactRetried
    | ResultsLost
    | OutputFetched
    | LineTyped
)
Inbox = queue.SimpleQueue[Message]
