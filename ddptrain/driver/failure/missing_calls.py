"""Whether a rank waits in a ctx method that another rank will never call: told from where all ranks are.

Not from time: a slow rank may take as long as it likes. A rank can't come any more if it has ended, or if it waits
for the waiting rank in something that it should have come to later: `if ctx.rank == 0: ctx.checkpoint(...)`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ddptrain.driver.failure.fault import Fault, Kind, ranks_in_words
from ddptrain.driver.failure.hang_diagnosis import Report
from ddptrain.protocol import events


def uncalled(reports: Sequence[Report], before: Mapping[int, events.Stacks]) -> Fault | None:
    """The fault of a gang in which a rank waits in a ctx method for ranks that will never call it; None else.

    `before` are the stacks of an earlier look: a rank that is where it was then waits, even if no frame says so.
    """
    for report in reports:
        stacks = report.stacks
        if stacks is None or not stacks.waits or report.over:
            continue
        lacking = [other for other in reports if _lacks(other, stacks)]
        absent = [other.rank for other in lacking if _can_not_come(other, stacks, before.get(other.rank))]
        if absent:
            return _fault(report.rank, stacks, absent)
    return None


def _fault(rank: int, stacks: events.Stacks, absent: Sequence[int]) -> Fault:
    at = f" at step {stacks.waits_step}" if stacks.waits_step is not None else ""
    has = "has" if len(absent) == 1 else "have"
    text = (
        f"rank {rank} is in ctx.{stacks.waits}{at}, which rank {ranks_in_words(absent)} {has} not called; "
        "all ranks must call it"
    )
    return Fault(rank, Kind.EXCEPTION, time.time_ns(), text)


def _lacks(other: Report, waiting: events.Stacks) -> bool:
    """Whether a rank is known to have called the method less often than the one that waits in it."""
    calls = other.calls
    return calls is not None and calls.get(waiting.waits, 0) < waiting.calls.get(waiting.waits, 0)


def _can_not_come(other: Report, waiting: events.Stacks, before: events.Stacks | None) -> bool:
    """Whether a rank that lacks the call has ended, or waits in what the waiting rank has not begun."""
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
