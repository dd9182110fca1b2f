"""Which problems `ddptrain schedule check --quiet` prints: a new one, again after a day, and once when it is over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from ddptrain.file_ops import write_atomic
from ddptrain.schedule.entries import Entries

_AGAIN_AFTER = timedelta(days=1)


def new_alarms(entries: Entries, lines: Mapping[str, str], now: datetime, *, save: bool) -> list[str]:
    """Return the lines to print. Raises nothing: if the state cannot be read or written, all problems are printed.

    lines: what was checked -> its problem in one line, "" for none. save: whether to record what is printed; only one
    process at a time may do so.
    """
    path = entries.folder / "alarms"
    before = _read(path)
    after = {subject: alarm for subject, alarm in before.items() if subject not in lines}
    printed = []
    for subject, line in lines.items():
        told, last_line = before.get(subject, (None, ""))
        if line:
            is_known = told is not None and timedelta(0) <= now - told < _AGAIN_AFTER
            printed += [] if is_known else [line]
            after[subject] = (told if told and is_known else now, line)
        elif told is not None:
            printed.append(f"solved: {last_line}")
    if save and after != before:
        data = {subject: [told.isoformat(), line] for subject, (told, line) in after.items()}
        with suppress(OSError):
            write_atomic(path, json.dumps(data, indent=1).encode(), mode=0o600)
    return printed


def _read(path: Path) -> dict[str, tuple[datetime, str]]:
    """Return what was checked -> when its problem was printed last, and its line; {} if the file is damaged."""
    try:
        raw = json.loads(path.read_bytes())
        return {str(subject): (datetime.fromisoformat(told), str(line)) for subject, (told, line) in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
