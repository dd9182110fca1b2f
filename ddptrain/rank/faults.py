"""What an exception that leaves the user's code says: its traceback, and whether it is only a victim's.

An exception in a DataLoader's worker comes to the rank as text inside another of the same type: it is taken apart
again, so that the person reads the frames and the words of the real one.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from ddptrain.protocol import events

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
    "connectfullmesh failed",
)
# What a rank says that has waited in vain for another one, in gloo's, NCCL's and the store's words.
_TIMED_OUT_WORDS = (
    "timed out waiting",
    "timed out in blocking wait",
    "application timeout caused pair closure",
    "failed to pass monitoredbarrier",
    "collective operation timeout",
    "wait timeout",
)
_FROM_LOADER = re.compile(
    r"Caught (?P<type>\w+) in (?P<where>[^\n]+)\.\nOriginal (?P<trace>Traceback \(most recent call last\):\n.*)",
    re.DOTALL,
)
_WRAPPER = re.compile(r"^[\w.]+: [\"']?Caught \w+ in ", re.MULTILINE)
_LOADERS_OWN = re.compile(r'  File ".*/torch/utils/data/_utils/(worker|fetch|pin_memory)\.py", line .*\n(    .*\n)*')


def failure(error: BaseException, phase: str) -> events.Failure:
    """The event that tells of an exception that ends the rank, as of now."""
    text, trace = _text(error), user_traceback(error)
    if (wrapped := _FROM_LOADER.match(text)) is not None:
        return _event(wrapped["type"], *_unwrapped(wrapped, trace), phase)
    failed = _event(type(error).__qualname__, str(error), trace, phase)
    return dataclasses.replace(failed, lost_peer=lost_peer(error), timed_out=timed_out(error))


def _text(error: BaseException) -> str:
    """What the exception was given, where that is a text: str() of a KeyError puts it in quotes."""
    return str(error.args[0]) if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)


def _unwrapped(wrapped: re.Match[str], outer: str) -> tuple[str, str]:
    """Message and traceback of the exception that a DataLoader's worker had, and how it reached the rank."""
    trace = wrapped["trace"].rstrip("\n") + "\n"
    last = list(re.finditer(rf"^(?:[\w.]+\.)?{wrapped['type']}(?::\ |$)", trace, re.MULTILINE))
    message = trace[last[-1].end() :].strip() if last else ""
    frames = _WRAPPER.split(outer, maxsplit=1)[0]
    came = f"\nIn {wrapped['where']}, which this rank was waiting for:\n\n{frames}"
    first, line_end, rest = message.partition("\n")
    return f"{first} (in {wrapped['where']}){line_end}{rest}", _LOADERS_OWN.sub("", trace) + came


def bad_exit(stop: SystemExit, phase: str) -> events.Failure:
    """The event that tells of sys.exit() with anything but 0, as of now."""
    return _event("SystemExit", f"sys.exit({stop.code!r})", user_traceback(stop), phase, exit_code=exit_code(stop))


def _event(kind: str, message: str, trace: str, phase: str, *, exit_code: int | None = None) -> events.Failure:
    return events.Failure(
        time.time_ns(),
        type=kind,
        message=clipped(message, 4_000),
        traceback=clipped(trace, 100_000),
        phase=phase,
        exit_code=exit_code,
    )


def exit_code(stop: SystemExit) -> int:
    """What the interpreter would exit with: an integer's low byte, 0 for None, 1 for anything else."""
    if stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def name_search_path(error: BaseException) -> None:
    """Add to an import error which Python has looked where: it is the worker's, not that of the command."""
    if isinstance(error, ModuleNotFoundError) and sys.executable not in str(error):
        error.add_note(f"looked for by {sys.executable} in sys.path {sys.path}")


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on: the frames of the launcher say nothing about the fault."""
    lines = traceback.TracebackException.from_exception(error)
    ours = {
        str(Path(__file__).with_name(name)) for name in ("process.py", "script.py", "entrypoint.py", "load_workload.py")
    }
    ours.add(_dispatch_file())
    kept = [frame for frame in lines.stack if frame.filename not in ours]
    lines.stack[:] = kept or list(lines.stack)
    return "".join(lines.format())


def _dispatch_file() -> str:
    module = sys.modules.get("dask_pytorch_ddp.dispatch")
    return str(getattr(module, "__file__", ""))


def lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank has gone."""
    return _is_of_torch(error) and _says(error, _LOST_PEER_WORDS)


def timed_out(error: BaseException) -> bool:
    """Whether the error only says that another rank has not come to a collective operation."""
    return _is_of_torch(error) and _says(error, _TIMED_OUT_WORDS)


def _is_of_torch(error: BaseException) -> bool:
    """Whether the error may be one of torch.distributed's, not that of the user's own connection to elsewhere."""
    if isinstance(error, OSError):
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        return any("/torch/distributed/" in file for file in files)
    return isinstance(error, RuntimeError)  # torch's DistError tree is below it


def _says(error: BaseException, words: Iterable[str]) -> bool:
    text = str(error).lower()
    return any(some in text for some in words)


def clipped(text: str, limit: int) -> str:
    """The text, its middle left out where it has more characters than `limit`."""
    return (
        text
        if len(text) <= limit
        else f"{text[: limit // 2]}\n... [{len(text) - limit} characters] ...\n{text[-limit // 2 :]}"
    )
