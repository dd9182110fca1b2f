"""Reads events.jsonl, which another user may have written."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ddptrain.file_ops import open_regular
from ddptrain.results.metrics import json_object

LAST_BYTES = 16 << 20  # the end of the file, which contains the last attempt
_LONGEST_LINE_BYTES = 1 << 20
_LARGEST_S = 1e12


def read_events(path: Path, kinds: Collection[str], last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of these kinds, each with a number as `time_s`. last_bytes: only from the end of a larger file.

    Damaged lines and lines above 1 MiB are skipped; a file that cannot be read has no events.
    """
    marks = [f'"event":"{kind}"'.encode() for kind in kinds]
    try:
        descriptor = open_regular(path)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        while line := file.readline(_LONGEST_LINE_BYTES):
            event = json_object(line) if any(mark in line for mark in marks) else {}
            if event.get("event") in kinds and is_time(event.get("time_s")):
                yield event


def is_time(value: object) -> bool:
    """Return whether a value of JSON is a possible number of seconds."""
    return isinstance(value, int | float) and -_LARGEST_S < value < _LARGEST_S  # also false for NaN
