"""Events of driver/observers.py that are not in events.jsonl."""

from __future__ import annotations

from typing import Any


def expect(count: int, offsets: dict[int, int] | None = None, hidden: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"event": "ranks", "count": count, "offsets": offsets or {}, "hidden": hidden}


def numbers(rank: int, *logged: object) -> dict[str, Any]:
    return {"event": "numbers", "rank": rank, "numbers": logged}
