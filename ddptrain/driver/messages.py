"""What reaches the driver's main thread, from Dask, signal handlers and the porter: they only put, it takes."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddptrain.errors import DdptrainError


@dataclass(frozen=True, slots=True)
class Notice:
    """A worker tells of a rank: growth of its files, bytes of them, the store's port, or its exit."""

    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The Dask task of a rank ended with an error: no rank could be started, or its server died."""

    attempt: int
    rank: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The scheduler has lost a worker."""

    address: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """The driver was sent SIGINT or SIGTERM."""

    signum: int


@dataclass(frozen=True, slots=True)
class BroughtHome:
    """The porter has put something of a rank into the run directory."""

    rank: int
    what: str
    path: str


@dataclass(frozen=True, slots=True)
class NotBroughtHome:
    """The porter could not: `error` says why; the run goes on without what is not `vital`."""

    rank: int
    what: str
    error: BaseException
    vital: bool = True


@dataclass(frozen=True, slots=True)
class Delayed:
    """The porter could not, `failures` times in a row, and tries again."""

    rank: int
    what: str
    error: BaseException
    failures: int


@dataclass(frozen=True, slots=True)
class ResultsLost:
    """The run directory can't be kept where it belongs any more: the run has to end for `error`."""

    error: DdptrainError


Message = Notice | TaskFailed | WorkerLost | Signalled | BroughtHome | NotBroughtHome | Delayed | ResultsLost
Inbox = queue.SimpleQueue[Message]
