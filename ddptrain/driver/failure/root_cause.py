"""Which of several faults of an attempt is its root cause."""

from __future__ import annotations

from collections.abc import Sequence

from ddptrain.driver.failure.fault import LOSSES, Fault, FaultKind, format_ranks


def find_root_cause(faults: Sequence[Fault], finished: Sequence[int] = ()) -> Fault:
    """The root cause: the earliest fault that is not a victim's; the lowest rank among faults of the same time.

    If all faults are victims' and some ranks have `finished`, the first of those has left while others needed it. If
    several ranks report the same loss (their worker's), the lowest rank is named.
    """
    first = min(faults, key=lambda fault: (fault.victim, fault.time_ns, fault.rank, fault.kind, fault.message))
    if first.victim and finished:
        return returned_early(finished[0], sorted({fault.rank for fault in faults}), first.time_ns)
    if first.kind not in LOSSES:
        return first
    same = [fault for fault in faults if (fault.kind, fault.line) == (first.kind, first.line)]
    return min(same, key=lambda fault: (fault.rank, fault.time_ns))


def returned_early(rank: int, waiting: Sequence[int], time_ns: int) -> Fault:
    """The fault of a rank that has done its work while others still wait for it."""
    text = f"returned from the workload while rank {format_ranks(waiting)} waited for it in a collective operation"
    return Fault(rank, FaultKind.EXIT, time_ns, text)
