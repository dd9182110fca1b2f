"""The time that a call of ctx.log with five numbers takes in the training thread."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

_CALLS = 20_000
_WARM_S = 6.0  # in which trackers start
_BURSTS, _BURST_CALLS, _REST_S = 10, 500, 0.5


def workload(ctx: Any, out: str, tracked: bool = False) -> None:
    """Log in a loop without other work. Write the microseconds of a call to `out`."""
    numbers = {f"train/number-{index}": 0.5 + index for index in range(5)}
    for step in range(1_000):
        ctx.log(numbers, step=step)
    figures = _beside_trackers(ctx, numbers) if tracked else _in_a_row(ctx, numbers, 0)
    Path(out).write_text(json.dumps(figures))


def _in_a_row(ctx: Any, numbers: dict[str, float], first: int, calls: int = _CALLS) -> dict[str, float]:
    began, cpu_began = time.perf_counter(), time.thread_time()
    for step in range(first, first + calls):
        ctx.log(numbers, step=step)
    took_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
    return {"call_us": took_s / calls * 1e6, "cpu_us": cpu_s / calls * 1e6}


def _beside_trackers(ctx: Any, numbers: dict[str, float]) -> dict[str, float]:
    """The median of several bursts, with pauses in which trackers take all items."""
    time.sleep(_WARM_S)
    bursts = []
    for burst in range(_BURSTS):
        bursts.append(_in_a_row(ctx, numbers, 1_000 + burst * _BURST_CALLS, _BURST_CALLS))
        time.sleep(_REST_S)
    return {name: statistics.median(burst[name] for burst in bursts) for name in bursts[0]}
