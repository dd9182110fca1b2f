"""Reads events.jsonl of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ddptrain.file_ops import open_regular

_LAST_BYTES = 16 << 20  # the end of the file contains the last attempt
_LONGEST_LINE_BYTES = 1 << 20
_LATEST_S = 1e11  # in seconds since the epoch


def read_events(path: Path, kinds: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of these kinds from the last 16 MiB, each with `event` and a possible `time_s`.

    Damaged lines and lines above 1 MiB are skipped; a file that cannot be read has no events.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read(_LAST_BYTES).splitlines()
    except OSError:
        return
    wanted = [kind.encode() for kind in kinds]
    for line in lines:
        if not line.startswith(b'{"time_s"') or len(line) > _LONGEST_LINE_BYTES:
            continue
        if any(kind in line for kind in wanted) and (event := _parsed(line)) is not None and event["event"] in kinds:
            yield event


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
        is_event = isinstance(event, dict) and isinstance(event.get("event"), str)
        return event if is_event and 0.0 <= event.get("time_s") < _LATEST_S else None
    except (ValueError, RecursionError, TypeError):  # TypeError: time_s is not a number
        return None
