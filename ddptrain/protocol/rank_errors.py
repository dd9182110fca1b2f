"""Errors that libraries report for a rank: texts of a rank that waited for another one, and record()'s error file."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from ddptrain.protocol import events

_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process has exited",
    "remote process exited",
    "communicator was aborted",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "sendbytes failed",
    "ncclremoteerror",
    "connectfullmesh failed",
)
_TIMED_OUT = (
    "timed out waiting",
    "timed out in blocking wait",
    "application timeout caused pair closure",
    "failed to pass monitoredbarrier",
    "collective operation timeout",
    "collective operation timed out",
    "nccl operation timed out",
    "wait timeout",
)


def is_lost_peer(message: str) -> bool:
    """Return whether a message says that another rank has ended."""
    return any(part in message.lower() for part in _LOST_PEER)


def is_time_out(message: str) -> bool:
    """Return whether a message says that another rank did not join in time."""
    return any(part in message.lower() for part in _TIMED_OUT)


_MAX_BYTES = 1 << 20
_TYPE = re.compile(r"(?P<type>[^\W\d][\w.]*): (?P<message>.*)", re.DOTALL)


def read_error_file(path: Path) -> events.Failure | None:
    """Read and delete the file that torch elastic's record() writes for a script; None if there is none.

    A text of another format becomes the whole message, as under torchrun.
    """
    try:
        time_ns = path.stat().st_mtime_ns
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "backslashreplace")
    except OSError:
        return None
    with suppress(OSError):
        path.unlink()
    message, trace = text.strip(), ""
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        recorded = json.loads(text)["message"]
        message = recorded if isinstance(recorded, str) else str(recorded["message"])
        trace = "" if isinstance(recorded, str) else str((recorded.get("extraInfo") or {}).get("py_callstack", ""))
    match = _TYPE.match(message)
    kind, message = (match["type"], match["message"]) if match else ("", message)
    return events.Failure(time_ns, type=kind, message=message[:4_000], traceback=trace[-100_000:])
