"""What a call of ctx.log with five numbers costs the training thread."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

_CALLS = 20_000
_CALLS_WITH_STEPS = 3_000
_WARM_S = 6.0  # in which trackers start


def workload(ctx: Any, out: str, step_s: float = 0.0) -> None:
    """Logs in every step of nothing, or of `step_s` of work; writes the microseconds of a call to `out`."""
    numbers = {f"train/number-{index}": 0.5 + index for index in range(5)}
    for step in range(1_000):
        ctx.log(numbers, step=step)
    if step_s:
        _between_steps(ctx, out, numbers, step_s)
        return
    began = time.perf_counter()
    for step in range(_CALLS):
        ctx.log(numbers, step=step)
    took_s = time.perf_counter() - began
    Path(out).write_text(json.dumps({"call_us": took_s / _CALLS * 1e6}))


def _between_steps(ctx: Any, out: str, numbers: dict[str, float], step_s: float) -> None:
    matrix, calls_s, step = torch.randn(256, 256), list[float](), 1_000
    warm_at = time.perf_counter() + _WARM_S
    while len(calls_s) < _CALLS_WITH_STEPS:
        until = time.perf_counter() + step_s
        while time.perf_counter() < until:
            torch.mm(matrix, matrix)
        began = time.perf_counter()
        ctx.log(numbers, step=step)
        step += 1
        if began > warm_at:
            calls_s.append(time.perf_counter() - began)
    figures = {"call_us": statistics.mean(calls_s) * 1e6, "median_us": statistics.median(calls_s) * 1e6}
    Path(out).write_text(json.dumps(figures))
