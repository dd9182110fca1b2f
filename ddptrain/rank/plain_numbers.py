"""Converts what users pass as numbers (Python numbers, and tensors and arrays with one element) to Python numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddptrain.config.wording import shorten


def number(name: object, value: Any) -> float:
    """Return a number, or the only element of a tensor or array, as a number; an integer above 64 bits as a float.

    Raises TypeError, which contains `name`.
    """
    if type(value) is float:  # the fast path of nearly all calls
        return value
    item = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
    if isinstance(item, bool) or not isinstance(item, int | float):
        text = shorten(repr(value), 300)
        raise TypeError(f"ctx.log, ctx.progress and metrics take numbers: {name!r} is {text} ({type(value).__name__})")
    return item if isinstance(item, float) or -(2**63) <= item < 2**63 else _as_float(item)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return all values as Python numbers. Raises TypeError."""
    return {str(name): number(name, value) for name, value in values.items()}


def optional(name: str, value: Any) -> float | None:
    """Return the value as a number, or None. Raises TypeError."""
    return None if value is None else number(name, value)


def whole(name: str, value: Any) -> int:
    """Return the value as a whole number of at most 64 bits. Raises TypeError."""
    converted = number(name, value)
    is_too_large = abs(converted) >= 2**63
    if converted % 1 != 0 or is_too_large:
        limit = " of at most 64 bits" if is_too_large else ""
        raise TypeError(f"{name} must be a whole number{limit}, not {shorten(repr(value), 100)}")
    return int(converted)


def optional_whole(name: str, value: Any) -> int | None:
    """Return the value as a whole number, or None. Raises TypeError."""
    return None if value is None else whole(name, value)
