"""Which rank failed first: the first cause, not the last victim."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ddptrain.errors import ExitCode
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankExit


class Kind(StrEnum):
    """What ended a rank; it stands in run.json."""

    EXCEPTION = "exception"  # left the user's code
    EXIT = "exit"  # sys.exit, os._exit
    SIGNAL = "signal"
    REFUSED = "refused"  # the rank asked for something that is not allowed
    WORKER_LOST = "worker_lost"
    INFRASTRUCTURE = "infrastructure"  # no rank could be started, or ours broke
    RESULTS = "results"  # the run directory can't be written
    HANG = "hang"  # no progress in time
    TRACKER = "tracker"  # of the user's, where the configuration is strict about them


_EXIT_CODES = {
    Kind.WORKER_LOST: ExitCode.CLUSTER,
    Kind.INFRASTRUCTURE: ExitCode.CLUSTER,
    Kind.RESULTS: ExitCode.CLUSTER,
    Kind.HANG: ExitCode.HANG,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that ended a rank; `victim` marks one that only lost its peer.

    `timed_out` marks a victim that has waited in a collective operation for one that did not come.
    """

    rank: int
    kind: Kind
    time_ns: int
    message: str
    type: str = ""
    traceback: str = ""
    phase: str = ""
    victim: bool = False
    timed_out: bool = False
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
        victim=failure.lost_peer or failure.timed_out,
        timed_out=failure.timed_out,
        status=failure.exit_code,
    )


def from_tracker(rank: int, failed: events.TrackerFailed) -> Fault:
    """The fault of a rank whose work is done, but whose tracker has failed."""
    return Fault(rank, Kind.TRACKER, failed.time_ns, f"tracker {failed.tracker} {failed.message}")


def from_exit(ended: RankExit) -> Fault:
    """The fault of a rank that ended without a word: killed, or os._exit."""
    if ended.status < 0:
        victim = ended.timed_out
        return Fault(ended.rank, Kind.SIGNAL, ended.time_ns, ended.text, victim=victim, timed_out=victim)
    text = f"the process ended with {ended.text} in the middle of the workload"
    return Fault(ended.rank, Kind.EXIT, ended.time_ns, text, status=ended.status)


def first_cause(faults: Sequence[Fault], finished: Sequence[int] = ()) -> Fault:
    """The earliest fault that is not a victim's, or the earliest of all where there are only victims.

    Where there are only victims and some ranks have `finished`, the first of those has left the others in the lurch.
    Where a worker takes its ranks along, it is told of the first of them.
    """
    first = min(faults, key=lambda fault: (fault.victim, fault.time_ns))
    if first.victim and finished:
        return returned_early(finished[0], sorted({fault.rank for fault in faults}), first.time_ns)
    if first.kind not in (Kind.WORKER_LOST, Kind.INFRASTRUCTURE):
        return first
    return min((fault for fault in faults if fault.line == first.line), key=lambda fault: fault.rank)


def returned_early(rank: int, waiting: Sequence[int], time_ns: int) -> Fault:
    """The fault of a rank that has done its work while others still count on it."""
    text = f"returned from the workload while rank {ranks_in_words(waiting)} waited for it in a collective operation"
    return Fault(rank, Kind.EXIT, time_ns, text)


def after_thread(fault: Fault, ended: events.ThreadFailure | None) -> Fault:
    """A rank's fault, with the exception that has ended a thread of it before: the one may come of the other."""
    if ended is None or fault.kind is Kind.HANG or ended.time_ns > fault.time_ns:
        return fault
    first, line_end, rest = fault.message.partition("\n")
    message = f"{first} (its thread {ended.thread} had ended with {thread_in_words(ended)}){line_end}{rest}"
    trace = f"{fault.traceback}\nBefore, in thread {ended.thread}:\n\n{ended.traceback}"
    return dataclasses.replace(fault, message=message, traceback=trace)


def thread_in_words(ended: events.ThreadFailure) -> str:
    """The exception that has ended a thread, in one line."""
    first_line = ended.message.strip().partition("\n")[0]
    return f"{ended.type}: {first_line}" if first_line else ended.type


def ranks_in_words(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5": a gang may have hundreds."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
