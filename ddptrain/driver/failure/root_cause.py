"""Finds the root cause among the faults of an attempt."""

from __future__ import annotations

from collections.abc import Sequence

from ddptrain.driver.failure.fault import LOSSES, Fault, FaultKind, format_ranks


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
