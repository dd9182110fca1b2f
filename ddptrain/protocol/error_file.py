"""Reads the error file that torch elastic's record() writes for a script, as torchrun does."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from ddptrain.protocol import events

_MAX_BYTES = 1 << 20
_MAX_TRACEBACK = 100_000  # characters
_TYPE = re.compile(r"(?P<type>[^\W\d][\w.]*): (?P<message>.*)", re.DOTALL)


def read_error_file(path: Path) -> events.Failure | None:
    """Read and delete the error file; None if there is none. A text of another format becomes the whole message."""
    try:
        time_ns = path.stat().st_mtime_ns
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "backslashreplace")
    except OSError:
        return None
    with suppress(OSError):
        path.unlink()
    message, trace = _message_and_traceback(text)
    match = _TYPE.match(message)
    kind, message = (match["type"], match["message"]) if match else ("", message)
    return events.Failure(time_ns, type=kind, message=message[:4_000], traceback=trace[-_MAX_TRACEBACK:])


def _message_and_traceback(text: str) -> tuple[str, str]:
    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return message, ""
        return str(message["message"]), str((message.get("extraInfo") or {}).get("py_callstack", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text.strip(), ""
