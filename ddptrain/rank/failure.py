"""What goes wrong in a rank: failure events from exceptions, whether it is only a victim, and stacks if it hangs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import inspect
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import groupby
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import counted
from ddptrain.errors import CheckpointNotWritten, one_line
from ddptrain.file_ops import open_append
from ddptrain.protocol import events
from ddptrain.protocol.news import describe_status
from ddptrain.protocol.rank_errors import is_lost_peer, is_time_out
from ddptrain.protocol.rank_spec import STACKS_DUMP, STACKS_END, STACKS_SIGNAL, RankSpec

if TYPE_CHECKING:
    from ddptrain.rank.output import Emitter


def lost_peer(error: BaseException) -> bool:
    """Return whether the error only says that another rank has ended, or follows from such an error.

    An error of a backend or the store of torch.distributed counts whatever its message: this rank was in a collective.
    """
    known = [each for each in chain(error) if _is_from_torch(each)]
    of_backend = any(cls.__name__ == "DistError" for each in known for cls in type(each).__mro__)  # DistBackendError
    return (of_backend or any(is_lost_peer(message_of(each)) for each in known)) and not timed_out(error)


def timed_out(error: BaseException) -> bool:
    """Return whether the error says that another rank did not join in time, or follows from such an error."""
    return any(_is_from_torch(each) and is_time_out(message_of(each)) for each in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then the earlier errors that its traceback shows: causes, and errors that were being handled."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def message_of(error: BaseException) -> str:
    """Return str() of a user's exception; str() itself may raise an exception."""
    try:
        return str(error)
    except Exception:  # any user's code
        return "<exception str() failed>"  # as in Python's tracebacks


def _is_from_torch(error: BaseException) -> bool:
    """Return whether the error can be from torch.distributed, and not from a connection of the user's code."""
    if isinstance(error, OSError):
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        return any("/torch/distributed/" in file for file in files)
    return isinstance(error, RuntimeError)  # the base class of torch's DistError


_PACKAGE = Path(__file__).parents[1]
_LAUNCHER = {
    "<frozen runpy>",
    *(str(_PACKAGE / "rank" / f"{name}.py") for name in ("lifecycle", "entrypoint")),
}
_FRAME = r'  File "[^"\n]*", line [^\n]*\n(?:    [^\n]*\n|  \[Previous line repeated[^\n]*\n)*'
_FILE = re.compile(r'  File "([^"\n]*)"')
_FRAMES = re.compile(f"(?:{_FRAME})+")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(torch|dask_pytorch_ddp)/")
_ONE_FRAME = re.compile(_FRAME)


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of the launcher, which say nothing about the fault."""
    lines = traceback.TracebackException.from_exception(error)
    dispatch = str(getattr(sys.modules.get("dask_pytorch_ddp.dispatch"), "__file__", ""))
    kept = [frame for frame in lines.stack if frame.filename not in {*_LAUNCHER, dispatch}]
    lines.stack[:] = kept or list(lines.stack)
    return "".join(lines.format())


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame that is not of the launcher."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _LAUNCHER:
        trace = trace.tb_next
    return trace


def users_hook() -> Callable[..., object] | None:
    """Return the sys.excepthook that the user's code has set, below those of init_process_group; None for Python's."""
    hook: Callable[..., object] = sys.excepthook
    while hook.__module__ == "torch.distributed.distributed_c10d":  # it prints "[rank0]: " before each line
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return None if hook is sys.__excepthook__ else hook


def shortened(trace: str) -> str:
    """Return the traceback with one line for each sequence of frames of torch, ddptrain or Python's import system."""

    def shorten(frames: re.Match[str]) -> str:
        runs = ((library, list(run)) for library, run in groupby(_ONE_FRAME.findall(frames[0]), _library))
        return "".join(
            f"  ... {counted(len(run), 'frame')} of {library} ...\n" if library else "".join(run)
            for library, run in runs
        )

    return _FRAMES.sub(shorten, trace)


def _library(frame: str) -> str:
    """Return the library of a frame; "" for the user's code and the built-in workloads."""
    match = _FILE.match(frame)
    file = match[1] if match else ""
    if file.startswith("<frozen "):
        return "Python"
    if installed := _LIBRARY.search(file):
        return installed[1]
    path = Path(file)
    internal = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "workloads")
    return "ddptrain" if internal else ""


def clipped(text: str, limit: int) -> str:
    """Return the text without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... [{len(text) - limit} characters] ...\n{text[-limit // 2 :]}"


_FROM_LOADER = re.compile(
    r"Caught (?P<type>\w+) in (?P<where>[^\n]+)\.\nOriginal (?P<trace>Traceback \(most recent call last\):\n.*)",
    re.DOTALL,
)
_WRAPPER = re.compile(r"^[\w.]+: [\"']?Caught \w+ in ", re.MULTILINE)
_LOADER_FRAMES = re.compile(r'  File ".*/torch/utils/data/_utils/(worker|fetch|pin_memory)\.py", line .*\n(    .*\n)*')


def failure(error: BaseException, phase: str) -> events.Failure:
    """Return the event for an exception that ends the rank, with the current time."""
    text = message_of(error)
    if len(error.args) == 1 and isinstance(error.args[0], str):  # str() of a KeyError would add quotes
        text = error.args[0]
    trace = user_traceback(error)
    if (wrapped := _FROM_LOADER.match(text)) is not None:
        return _event(wrapped["type"], *_unwrapped(wrapped, trace), phase)
    note = _ended_loader_workers(error) or _earlier(error, phase)
    message = message_of(error) if note or message_of(error).strip() else _raising_line(error)
    message = NO_DEBUGGER if type(error).__name__ == "BdbQuit" else message  # pdb.set_trace() without --debug
    return _event(type(error).__qualname__, _with_note(message, note), trace, phase, error)


def handled(phase: str) -> events.Failure | None:
    """Return the event for the exception that the main thread is handling in an `except` or `finally` block.

    Return None if there is none, or if it only says that another rank has ended.
    """
    if (error := handled_error()) is None:
        return None
    event = failure(error, phase)
    return None if event.lost_peer or event.timed_out else dataclasses.replace(event, handled=True)


def handled_error() -> Exception | None:
    """Return the exception that the main thread is handling; None if there is none, or only a SystemExit or similar."""
    # Python 3.11 has a tuple in place of the exception. There is no public API.
    current: object = sys._current_exceptions().get(threading.main_thread().ident or 0)  # noqa: SLF001
    error = current[1] if isinstance(current, tuple) else current
    return error if isinstance(error, Exception) else None


def _raising_line(error: BaseException) -> str:
    """Return the line that raised an exception without a message, such as a failed assertion."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def _earlier(error: BaseException, phase: str) -> str:
    """Return the exception that caused this one, as a note; "" if there is none, or if the message contains it."""
    *_, first = [each for each in chain(error) if "RemoteTraceback" not in type(each).__name__]  # text of `error`
    text = one_line(message_of(first))
    message = message_of(error)
    of_signal = message.startswith("DataLoader worker (pid ")  # torch raises it at any place, also in a handler
    if first is error or phase != "train" or of_signal or (text and text in message):
        return ""
    return clipped(f"after {type(first).__qualname__}" + (f": {text}" if text else ""), 300)


def _with_note(message: str, note: str) -> str:
    """Return the message with a note in parentheses at the end of its first line, often the only line shown."""
    first, line_end, rest = message.partition("\n")
    return f"{first} ({note}){line_end}{rest}" if note else message


def _ended_loader_workers(error: BaseException) -> str:
    """Return how DataLoader workers ended whose batch the rank was waiting for; "" if the error has another reason.

    If a worker ends while its batch is on the way, the rank gets only a broken connection or a missing socket.
    """
    if not (isinstance(error, OSError | EOFError) or "(pid(s)" in message_of(error)):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "_try_get_data"]
    workers = {w.sentinel: w for frame in frames for w in getattr(frame.f_locals.get("self"), "_workers", ())}
    for sentinel in connection.wait(workers, timeout=1.0):  # it may be about to end
        workers[sentinel].join(0.2)
    ended = [(number, worker.exitcode) for number, worker in enumerate(workers.values()) if worker.exitcode is not None]
    return ", ".join(f"DataLoader worker process {number}: {describe_status(status)}" for number, status in ended)


def _unwrapped(wrapped: re.Match[str], outer: str) -> tuple[str, str]:
    """Return message and traceback of the exception in a DataLoader worker, with the frames of the rank that waited."""
    trace = wrapped["trace"].rstrip("\n") + "\n"
    last = list(re.finditer(rf"^(?:[\w.]+\.)?{wrapped['type']}(?::\ |$)", trace, re.MULTILINE))
    message = trace[last[-1].end() :].strip() if last else ""
    frames = _WRAPPER.split(outer, maxsplit=1)[0]
    waiting = f"\nIn {wrapped['where']}, which this rank was waiting for:\n\n{frames}"
    return _with_note(message, f"in {wrapped['where']}"), _LOADER_FRAMES.sub("", trace) + waiting


NO_DEBUGGER = (
    "a debugger has no terminal in a rank: start the run with --debug [RANK], or set PYTHONBREAKPOINT=0 to skip "
    "breakpoints"
)


def refuse_breakpoint(*_: object, **__: object) -> None:
    """Stand for breakpoint() in a run without --debug. Raises RuntimeError."""
    raise RuntimeError(NO_DEBUGGER)


def bad_exit(stop: SystemExit, phase: str) -> events.Failure:
    """Return the event for a sys.exit() that is not a success, with the current time."""
    message = _with_note(f"sys.exit({stop.code!r})", _wrong_argument(stop) or _earlier(stop, phase))
    return dataclasses.replace(
        _event("SystemExit", message, user_traceback(stop), phase, stop), exit_code=exit_code(stop)
    )


def _wrong_argument(stop: SystemExit) -> str:
    """Return the message that argparse has printed before it called sys.exit(2); "" for other exits."""
    frames = [frame for frame, _ in traceback.walk_tb(stop.__traceback__)]
    errors = [frame for frame in frames if frame.f_code is argparse.ArgumentParser.error.__code__]
    return clipped(one_line(str(errors[-1].f_locals["message"])), 300) if errors else ""


def _event(kind: str, message: str, trace: str, phase: str, error: BaseException | None = None) -> events.Failure:
    """Return the event; `error` is None for an exception of another process, which is no victim of another rank."""
    return events.Failure(
        time.time_ns(),
        type=kind,
        message=clipped(message, 4_000),
        traceback=clipped(trace, 100_000),
        phase=phase,
        lost_peer=error is not None and lost_peer(error),
        timed_out=error is not None and timed_out(error),
        unwritable=isinstance(error, CheckpointNotWritten),
    )


def exit_code(stop: SystemExit) -> int:
    """Return the exit code that Python would use: the low byte of an integer, 0 for None, 1 for anything else."""
    if stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def add_search_path(error: BaseException) -> None:
    """Add the interpreter and sys.path to an import error, because the worker's differ from those of the command.

    The folders of the standard library are left out, and so are repetitions.
    """
    if isinstance(error, ModuleNotFoundError) and sys.executable not in str(error):
        library = os.path.dirname(os.__file__)
        zipped = os.path.join(os.path.dirname(library), f"python{sys.version_info.major}{sys.version_info.minor}.zip")
        standard = {library, os.path.join(library, "lib-dynload"), zipped}
        folders = [folder or "." for folder in dict.fromkeys(sys.path) if folder not in standard]
        error.add_note(f"not found by {sys.executable} in {', '.join(folders)}")


class StackWriter:
    """Writes the stacks of all threads to the file from which the worker reports them.

    This process writes them by itself on a command, else faulthandler does because of the worker's signal.
    """

    def __init__(self, spec: RankSpec) -> None:
        # Opened now, because faulthandler's C code cannot open files.
        self._dump_fd = open_append(Path(spec.host.staging) / STACKS_DUMP, create_mode=0o600)
        faulthandler.register(STACKS_SIGNAL, file=self._dump_fd, all_threads=True)

    def write(self) -> None:
        """Write the stacks, and then what is known about collective operations. For any thread but the main thread."""
        error = handled_error()
        handles = clipped(one_line(f"{type(error).__qualname__}: {message_of(error)}"), 300) if error else ""
        known = {"sequence": _sequence(), "handles": handles, "pending": _pending()}
        with contextlib.suppress(OSError):  # a full disk must not end the thread that handles commands
            faulthandler.dump_traceback(self._dump_fd, all_threads=True)
            os.write(self._dump_fd, f"{STACKS_END}{json.dumps(known)}\n".encode())


def _sequence() -> int | None:
    """Return the number of collective operations begun in the default group; None if unknown."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return None
        return int(c10d._get_default_group()._get_sequence_number_for_group())  # noqa: SLF001  # no public API
    except Exception:  # some backends do not count, and raise various errors
        return None


def _pending() -> str:
    """Return the oldest collective operation that torch's flight recorders know as not ended, as "all_reduce"."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    # NCCL has a recorder of its own, until torch 2.14; later each backend has one, gloo by default.
    readers = [("_dump_nccl_trace_json", ()), *(("_dump_fr_trace_json", (name,)) for name in ("nccl", "nccl2", "gloo"))]
    active: list[dict[str, Any]] = []
    for reader, backend in readers:
        with contextlib.suppress(Exception):  # this torch has no such recorder
            trace = json.loads(getattr(c10d, reader)(True, True, *backend))
            active += (entry for entry in trace.get("entries", []) if _is_pending(entry, trace["pg_status"]))
    oldest = min(active, key=lambda entry: entry["time_created_ns"], default={})
    return str(oldest.get("profiling_name", "")).rpartition(":")[2]


def _is_pending(entry: dict[str, Any], groups: dict[str, Any]) -> bool:
    """Return whether all ranks must join the operation, and neither it nor a later one of its group has ended."""
    ended = int(groups.get(str(entry["pg_id"]), {}).get("last_completed_collective", -1))
    return not entry["retired"] and not entry["is_p2p"] and entry["collective_seq_id"] > ended


def report_thread_failures(emitter: Emitter) -> None:
    """Report exceptions that end a thread. The rank continues, as in any Python program."""
    print_error = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        error = ended.exc_value
        if error is not None and not isinstance(error, SystemExit):
            name = ended.thread.name if ended.thread is not None else ""
            trace = clipped("".join(traceback.format_exception(error)), 100_000)
            message = clipped(message_of(error), 4_000)
            emitter.emit(events.ThreadFailure(time.time_ns(), name, type(error).__qualname__, message, trace))
        print_error(ended)

    threading.excepthook = hook
