"""The results of all cases as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.chaos.runner import HANGS, LEFT_S, Findings

_GOALS = {"prompt": "median <= 1 s, worst <= 5 s", "hang": "its window + 10 s"}


def table(found: Sequence[Findings], took_s: float) -> str:
    """The table of results."""
    blamed = [one.cause_right for one in found if one.cause_right is not None]
    hangs = [one for one in found if one.case.kind.fault in HANGS]
    prompt = [one for one in found if one not in hangs]
    writes = [one for one in found if one.case.kind.moment in ("write", "home")]
    rows = [
        ("cases", f"{len(found)} in {took_s / 60:.1f} min", ">= 200 in 20 min"),
        ("as they must be", f"{sum(not one.problems for one in found)} of {len(found)}", "all"),
        ("right root cause", f"{sum(blamed)} of {len(blamed)}{_percent(blamed)}", "100 %"),
        ("fault to the command's end", _times(prompt), _GOALS["prompt"]),
        ("the same, of hangs", _times(hangs), _GOALS["hang"]),
        (f"processes left after {LEFT_S:g} s", str(sum(one.left for one in found)), "0"),
        ("verified checkpoints lost", f"{sum(one.lost for one in found)} in {len(writes)} faults in writes", "0"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:<{widths[0]}}  {figure:<{widths[1]}}  goal: {goal}" for name, figure, goal in rows]
    slow = sorted((one for one in prompt if one.fault_to_end_s), key=lambda one: -(one.fault_to_end_s or 0))[:3]
    told = [f"  {one.fault_to_end_s:.2f} s: case {one.case.number}, {one.case.words}" for one in slow]
    return "\n".join([*lines, "slowest ends:", *told])


def problems(one: Findings) -> str:
    """The report of a failed case: the problems, the command that repeats it, and the output."""
    wrong = "\n".join(f"  - {problem}" for problem in one.problems)
    return f"FAILED case {one.case.number}: {one.case.words}\n{wrong}\n  again: {one.case.reproduction}\n{one.output}\n"


def _percent(values: Sequence[bool]) -> str:
    return f" ({100 * sum(values) / len(values):.1f} %)" if values else ""


def _times(found: Sequence[Findings]) -> str:
    times = [one.fault_to_end_s for one in found if one.fault_to_end_s is not None]
    if not times:
        return "none measured"
    return f"median {statistics.median(times):.2f} s, worst {max(times):.2f} s ({len(times)} cases)"
