"""Converts what users pass as numbers (Python numbers, and tensors and arrays with one element) to Python numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddptrain.config.wording import shorten


def number(name: object, value: Any) -> float:
    """The number that `value` is, or has as its only element. Raises TypeError, which names the argument."""
    if type(value) in (float, int):  # the fast path of nearly all calls
        return value  # type: ignore[no-any-return]
    item = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
    if isinstance(item, bool) or not isinstance(item, int | float):
        text = shorten(repr(value), 300)
        raise TypeError(f"ctx.log, ctx.progress and metrics take numbers: {name!r} is {text} ({type(value).__name__})")
    return item


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """All values as numbers. Raises TypeError."""
    return {str(name): number(name, value) for name, value in values.items()}


def optional(name: str, value: Any) -> float | None:
    """The value as a number, or None. Raises TypeError."""
    return None if value is None else number(name, value)


def whole(name: str, value: Any) -> int | None:
    """The value as a whole number, or None. Raises TypeError."""
    given = optional(name, value)
    if given is not None and given % 1 != 0:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return None if given is None else int(given)
