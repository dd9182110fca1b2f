"""Faults of ranks: their kinds, and their creation from failure events, exits of ranks and failed trackers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ddptrain.errors import ExitCode, one_line
from ddptrain.protocol import events
from ddptrain.protocol.news import RankExit, describe_status
from ddptrain.results.run_record import FailureRecord


class FaultKind(StrEnum):
    """The kind of a fault; run.json contains it."""

    EXCEPTION = "exception"  # an exception left the user's code
    PARAMS = "params"  # the workload's function does not take the params
    EXIT = "exit"  # sys.exit, os._exit
    SIGNAL = "signal"
    REFUSED = "refused"  # the rank requested something that is not allowed
    WORKER_LOST = "worker_lost"
    INFRASTRUCTURE = "infrastructure"  # the rank could not be started, or a part of ddptrain failed
    RESULTS = "results"  # the run directory or the spool cannot be written
    HANG = "hang"  # no progress in time
    GUARD = "guard"  # a value is not as the section failure demands, such as NaN with failure.nan: stop


_EXIT_CODES = {
    FaultKind.PARAMS: ExitCode.USAGE,
    FaultKind.WORKER_LOST: ExitCode.CLUSTER,
    FaultKind.INFRASTRUCTURE: ExitCode.CLUSTER,
    FaultKind.RESULTS: ExitCode.CLUSTER,
    FaultKind.HANG: ExitCode.HANG,
}
LOSSES = frozenset({FaultKind.WORKER_LOST, FaultKind.INFRASTRUCTURE})
_PHASES = {"setup": " (before the process group was up)", "rendezvous": " (while the process group came up)"}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that ended a rank.

    time_ns: wall clock of the rank's host. phase: "setup", "rendezvous" or "". victim: the rank has only lost a peer.
    timed_out: a victim that waited in a collective operation for a rank that did not join. status: the exit code that
    the process chose itself, or None.
    """

    rank: int
    kind: FaultKind
    time_ns: int
    message: str
    type: str = ""
    traceback: str = ""
    phase: str = ""
    victim: bool = False
    timed_out: bool = False
    status: int | None = None

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command if this fault is the root cause."""
        return _EXIT_CODES.get(self.kind, ExitCode.TRAINING_FAILED)

    @property
    def line(self) -> str:
        """The fault in one line, without its rank."""
        if self.kind is FaultKind.PARAMS:
            return "; ".join(self.message.splitlines())
        text = one_line(self.message) if self.type in ("", "SystemExit") else _one_line(self.type, self.message)
        return text + _PHASES.get(self.phase, "") + _interface_hint(text)

    def record(self, host: str, log: str, cause: str) -> FailureRecord:
        """Return the fault as run.json contains it; `log` is the path of the rank's log, `cause` the root cause."""
        return FailureRecord(self.rank, host, self.kind, self.type, self.message, self.traceback, log, cause)


def _interface_hint(text: str) -> str:
    """Return what to do about a missing network interface, which the messages of gloo and NCCL do not say; else ""."""
    if (match := re.search(r"Unable to find address for: (\S+)", text)) is not None:
        return f"; the host has no network interface {match[1]}: change GLOO_SOCKET_IFNAME (`ip link` lists them)"
    if "no socket interface found" in text.lower():
        return "; the host has no such network interface: change NCCL_SOCKET_IFNAME (`ip link` lists them)"
    return ""


def from_failure(rank: int, failure: events.Failure) -> Fault:
    """Return the fault for a failure event of a rank."""
    kind = FaultKind.EXIT if failure.exit_code is not None else FaultKind.EXCEPTION
    if failure.phase == "setup" and failure.type == "WrongParams":  # of rank/entrypoint.py
        kind = FaultKind.PARAMS
    return Fault(
        rank=rank,
        kind=FaultKind.RESULTS if failure.unwritable else kind,
        time_ns=failure.time_ns,
        message=failure.message,
        type=failure.type,
        traceback=failure.traceback,
        phase=failure.phase if failure.phase != "train" else "",
        victim=failure.lost_peer or failure.timed_out,
        timed_out=failure.timed_out,
        status=failure.exit_code,
    )


def from_exit(rank: int, ended: RankExit, where: str = "in the middle of the workload") -> Fault:
    """Return the fault of a rank that ended without reporting a failure: it was killed, or it called os._exit."""
    if ended.status < 0:
        victim = ended.timed_out or ended.lost_peer
        return Fault(rank, FaultKind.SIGNAL, ended.time_ns, ended.text, victim=victim, timed_out=ended.timed_out)
    text = f"the process ended with {describe_status(ended.status)} {where}"
    if ended.reason:
        text = f"{text}, and could not report why: {ended.reason}"
        return Fault(rank, FaultKind.RESULTS, ended.time_ns, text, status=ended.status)
    return Fault(rank, FaultKind.EXIT, ended.time_ns, text, status=ended.status)


def add_thread_failure(fault: Fault, ended: events.ThreadFailure | None) -> Fault:
    """Return the fault with the exception that ended one of the rank's threads earlier, which may be the reason."""
    if ended is None or fault.kind is FaultKind.HANG or ended.time_ns > fault.time_ns:
        return fault
    first, line_end, rest = fault.message.partition("\n")
    message = f"{first} (its thread {ended.thread} had ended with {ended.error}){line_end}{rest}"
    trace = f"{fault.traceback}\nBefore, in thread {ended.thread}:\n\n{ended.traceback}"
    return dataclasses.replace(fault, message=message, traceback=trace)


def _one_line(kind: str, message: str) -> str:
    """Return an exception as Python names it in the last line of a traceback: without a colon if it has no message."""
    first_line, kind = one_line(message), one_line(kind)
    return f"{kind}: {first_line}" if first_line else kind


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text with ranges: 0, 1, 2, 5 as "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


# --- the root cause ---


def find_root_cause(faults: Sequence[Fault], finished: Sequence[int] = ()) -> Fault:
    """Return the root cause: the earliest fault that is not a victim's; of simultaneous faults, that of the lowest
    rank.

    If all faults are victims' and some ranks have `finished`, the first of these has left while other ranks needed it.
    If several ranks report the same loss of their worker, the lowest rank is named.
    """
    first = min(faults, key=lambda fault: (fault.victim, fault.time_ns, fault.rank, fault.kind, fault.message))
    if first.victim and finished:
        return returned_early(finished[0], sorted({fault.rank for fault in faults}), first.time_ns)
    if first.kind not in LOSSES:
        return first
    same = [fault for fault in faults if (fault.kind, fault.line) == (first.kind, first.line)]
    return min(same, key=lambda fault: (fault.rank, fault.time_ns))


def returned_early(rank: int, waiting: Sequence[int], time_ns: int) -> Fault:
    """Return the fault of a rank that has finished its work while other ranks still wait for it."""
    text = f"returned from the workload while rank {format_ranks(waiting)} waited for it in a collective operation"
    return Fault(rank, FaultKind.EXIT, time_ns, text)
