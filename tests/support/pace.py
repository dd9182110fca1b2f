"""How fast this machine runs Python, for limits on the cost of a call: they mean work, not a model of processor."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

_REFERENCE_S = 1.0e-6  # what one call of `_work` takes on the machine for which the limits were set
_PATIENCE_S = 30.0


def is_cheap(call: Callable[[int], object], limit_s: float, calls: int = 1000) -> bool:
    """Whether `call` takes less than `limit_s` on the reference machine, and in proportion on this one.

    Each round measures both; the best of many rounds counts, since other programs may use the processor meanwhile.
    """
    deadline = time.monotonic() + _PATIENCE_S
    best = math.inf
    slowness = math.inf
    for start in itertools.count(0, calls):
        slowness = min(slowness, _seconds(_work, start, calls) / _REFERENCE_S)
        best = min(best, _seconds(call, start, calls))
        if best < limit_s * max(1.0, slowness):
            return True
        if time.monotonic() > deadline:
            return False
    return False


def _seconds(call: Callable[[int], object], start: int, calls: int) -> float:
    began = time.perf_counter()
    for number in range(start, start + calls):
        call(number)
    return (time.perf_counter() - began) / calls


def _work(number: int) -> dict[str, str]:
    return {name: f"{name}{number}" for name in ("a", "b", "c", "d", "e")}
