"""What users pass as numbers: Python's own, and tensors and arrays of one element."""

from __future__ import annotations

from typing import Any


def number(name: object, value: Any) -> float:
    """The number that `value` is, or holds as its one element. Raises TypeError, which says where it was given."""
    if type(value) in (float, int):  # what it nearly always is, in every step
        return value  # type: ignore[no-any-return]
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise TypeError(f"ctx.log and metrics take numbers: {name!r} is {value!r} ({type(value).__name__})")
    return item


def whole(name: str, value: Any) -> int | None:
    """Likewise a whole number, or None."""
    given = None if value is None else number(name, value)
    if given is not None and int(given) != given:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return None if given is None else int(given)


def optional(name: str, value: Any) -> float | None:
    """Likewise any number, or None."""
    return None if value is None else number(name, value)
