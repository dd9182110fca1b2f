"""What an exception that leaves the user's code says: its traceback, and whether it is only a victim's."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from ddptrain import events

# What a rank that merely lost its peer says, in gloo's, NCCL's, the store's and the socket layer's words.
_LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process has exited",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "sendbytes failed",
    "ncclremoteerror",
    "application timeout caused pair closure",
    "connectfullmesh failed",
    "timed out waiting for clients",
    "wait timeout",
)


def failure(error: BaseException, phase: str) -> events.Failure:
    """The event that tells of an exception that ends the rank, as of now."""
    return _event(type(error).__qualname__, str(error), user_traceback(error), phase, lost_peer=lost_peer(error))


def bad_exit(stop: SystemExit, phase: str) -> events.Failure:
    """The event that tells of sys.exit() with anything but 0, as of now."""
    return _event("SystemExit", f"sys.exit({stop.code!r})", user_traceback(stop), phase, exit_code=exit_code(stop))


def _event(
    kind: str, message: str, trace: str, phase: str, *, exit_code: int | None = None, lost_peer: bool = False
) -> events.Failure:
    return events.Failure(
        time.time_ns(),
        type=kind,
        message=clipped(message, 4_000),
        traceback=clipped(trace, 100_000),
        phase=phase,
        exit_code=exit_code,
        lost_peer=lost_peer,
    )


def exit_code(stop: SystemExit) -> int:
    """What the interpreter would exit with: an integer's low byte, 0 for None, 1 for anything else."""
    if stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on: the frames of the launcher say nothing about the fault."""
    lines = traceback.TracebackException.from_exception(error)
    ours = {str(Path(__file__).with_name("process.py")), _dispatch_file()}
    kept = [frame for frame in lines.stack if frame.filename not in ours]
    lines.stack[:] = kept or list(lines.stack)
    return "".join(lines.format())


def _dispatch_file() -> str:
    module = sys.modules.get("dask_pytorch_ddp.dispatch")
    return str(getattr(module, "__file__", ""))


def lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank has gone."""
    if not isinstance(error, RuntimeError | ConnectionError | OSError):  # torch's DistError tree is below RuntimeError
        return False
    text = str(error).lower()
    return any(words in text for words in _LOST_PEER_WORDS)


def clipped(text: str, limit: int) -> str:
    """The text, its middle left out where it has more characters than `limit`."""
    return (
        text
        if len(text) <= limit
        else f"{text[: limit // 2]}\n... [{len(text) - limit} characters] ...\n{text[-limit // 2 :]}"
    )
