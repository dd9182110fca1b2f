"""What a call of ctx.log with five numbers costs the training thread."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_CALLS = 20_000


def workload(ctx: Any, out: str) -> None:
    """Logs in every step of nothing; writes the microseconds of a call to `out`."""
    numbers = {f"train/number-{index}": 0.5 + index for index in range(5)}
    for step in range(1_000):
        ctx.log(numbers, step=step)
    began = time.perf_counter()
    for step in range(_CALLS):
        ctx.log(numbers, step=step)
    took_s = time.perf_counter() - began
    Path(out).write_text(json.dumps({"call_us": took_s / _CALLS * 1e6}))
