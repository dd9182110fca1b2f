"""Finds a rank that waits in a ctx method which another rank will never call: `if ctx.rank == 0: ctx.checkpoint()`.

There is no time limit, so a slow rank may take as long as it needs. A rank can never call the method if it has ended,
or if it waits for the waiting rank in a later operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddptrain.driver.failure.fault import Fault, FaultKind, format_ranks
from ddptrain.driver.failure.hang_diagnosis import RankReport
from ddptrain.protocol import events


def find_uncalled(reports: Sequence[RankReport], before: Mapping[int, events.Stacks], time_ns: int) -> Fault | None:
    """The fault of a worker group in which a rank waits in a ctx method for ranks that will never call it, or None.

    `before` are the stacks of an earlier inquiry: a rank with an unchanged stack waits, even if no frame shows this.
    """
    for report in reports:
        stacks = report.stacks
        if stacks is None or not stacks.waits or report.over:
            continue
        lacking = [other for other in reports if _has_fewer_calls(other, stacks)]
        absent = [other.rank for other in lacking if _can_never_call(other, stacks, before.get(other.rank))]
        if absent:
            return _fault(report.rank, stacks, absent, time_ns)
    return None


def _fault(rank: int, stacks: events.Stacks, absent: Sequence[int], time_ns: int) -> Fault:
    at = f" at step {stacks.waits_step}" if stacks.waits_step is not None else ""
    has = "has" if len(absent) == 1 else "have"
    text = (
        f"rank {rank} is in ctx.{stacks.waits}{at}, which rank {format_ranks(absent)} {has} not called; "
        "all ranks must call it"
    )
    return Fault(rank, FaultKind.EXCEPTION, time_ns, text)


def _has_fewer_calls(other: RankReport, waiting: events.Stacks) -> bool:
    """Return whether a rank is known to have called the method less often than the rank that waits in it."""
    calls = other.calls
    return calls is not None and calls.get(waiting.waits, 0) < waiting.calls.get(waiting.waits, 0)


def _can_never_call(other: RankReport, waiting: events.Stacks, before: events.Stacks | None) -> bool:
    """Return whether a rank with fewer calls has ended, or waits in an operation that `waiting` has not begun."""
    if other.finished:
        return True
    stacks = other.stacks
    if stacks is None or other.over:
        return False
    if stacks.waits:
        return stacks.calls.get(stacks.waits, 0) > waiting.calls.get(stacks.waits, 0)
    if stacks.sequence is None or waiting.sequence is None or stacks.sequence <= waiting.sequence:
        return False
    stays = before is not None and (before.sequence, before.main) == (stacks.sequence, stacks.main)
    return bool(other.operation) or stays
