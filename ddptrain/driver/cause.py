"""Which rank failed first: the first cause, not the last victim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ddptrain import events
from ddptrain.errors import ExitCode
from ddptrain.spec import RankExit


class Kind(StrEnum):
    """What ended a rank; it stands in run.json."""

    EXCEPTION = "exception"  # left the user's code
    EXIT = "exit"  # sys.exit, os._exit
    SIGNAL = "signal"
    REFUSED = "refused"  # the rank asked for something that is not allowed
    WORKER_LOST = "worker_lost"
    INFRASTRUCTURE = "infrastructure"  # no rank could be started, or ours broke
    RESULTS = "results"  # the run directory can't be written


_EXIT_CODES = {
    Kind.WORKER_LOST: ExitCode.CLUSTER,
    Kind.INFRASTRUCTURE: ExitCode.CLUSTER,
    Kind.RESULTS: ExitCode.CLUSTER,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that ended a rank; `victim` marks one that only lost its peer."""

    rank: int
    kind: Kind
    time_ns: int
    message: str
    type: str = ""
    traceback: str = ""
    phase: str = ""
    victim: bool = False
    status: int | None = None  # the process's own, where it chose one

    @property
    def exit_code(self) -> ExitCode:
        """What the command exits with where this is the first cause."""
        return _EXIT_CODES.get(self.kind, ExitCode.TRAINING_FAILED)

    @property
    def line(self) -> str:
        """The fault in one line, without its rank."""
        first = self.message.strip().splitlines()[0] if self.message.strip() else ""
        text = f"{self.type}: {first}" if self.type and self.type != "SystemExit" else first
        where = {"setup": " before the process group was up", "rendezvous": " while the process group came up"}
        return text + where.get(self.phase, "")


def from_failure(rank: int, failure: events.Failure) -> Fault:
    """The fault that a rank reported itself."""
    return Fault(
        rank=rank,
        kind=Kind.EXIT if failure.exit_code is not None else Kind.EXCEPTION,
        time_ns=failure.time_ns,
        message=failure.message,
        type=failure.type,
        traceback=failure.traceback,
        phase=failure.phase if failure.phase != "train" else "",
        victim=failure.lost_peer,
        status=failure.exit_code,
    )


def from_exit(ended: RankExit) -> Fault:
    """The fault of a rank that ended without a word: killed, or os._exit."""
    if ended.status < 0:
        return Fault(ended.rank, Kind.SIGNAL, ended.time_ns, ended.text)
    text = f"the process ended with {ended.text} in the middle of the workload"
    return Fault(ended.rank, Kind.EXIT, ended.time_ns, text, status=ended.status)


def first_cause(faults: Sequence[Fault]) -> Fault:
    """The earliest fault that is not a victim's, or the earliest of all where there are only victims.

    Where a worker takes its ranks along, it is told of the first of them.
    """
    first = min(faults, key=lambda fault: (fault.victim, fault.time_ns))
    if first.kind not in (Kind.WORKER_LOST, Kind.INFRASTRUCTURE):
        return first
    return min((fault for fault in faults if fault.line == first.line), key=lambda fault: fault.rank)
