"""Reports the stacks of all threads of a rank when the driver asks for them, to explain a hang."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from ddptrain.errors import one_line
from ddptrain.file_ops import open_append, sha256
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_DUMP, STACKS_SIGNAL, RankSpec, stacks_path
from ddptrain.rank.failure import clipped, handled_error, message_of
from ddptrain.rank.output import Emitter

_MAX_FRAMES = 200


class StackReporter:
    """Reports a rank's stacks: those of the main thread as an event, those of all threads as a file."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec = spec
        self._emitter = emitter
        self._counter = itertools.count()
        # Opened now, because faulthandler's C code cannot open files.
        dump_fd = open_append(Path(spec.host.staging) / STACKS_DUMP, create_mode=0o600)
        faulthandler.register(STACKS_SIGNAL, file=dump_fd, all_threads=True)

    def report(self) -> None:
        """Emit the stacks now. Must be called in a thread other than the main thread."""
        with contextlib.suppress(OSError):  # a full disk must not end the thread that handles commands
            self._report()

    def _report(self) -> None:
        frames = sys._current_frames()  # noqa: SLF001  # no public API
        main = frames.get(threading.main_thread().ident or 0)
        self._emitter.emit(self._event(main))
        data = _text(self._spec, frames).encode("utf-8", "backslashreplace")
        staged = Path(self._spec.host.staging) / f"stacks-{next(self._counter)}"
        staged.write_bytes(data)
        path = stacks_path(self._spec.attempt, self._spec.rank)
        digest = sha256(data).hexdigest()
        self._emitter.emit(events.FileSaved(time.time_ns(), path, staged.name, len(data), digest))

    def _event(self, main: FrameType | None) -> events.Stacks:
        error = handled_error()
        handles = (
            clipped(one_line(f"{type(error).__qualname__}: {message_of(error)}"), 300) if error is not None else ""
        )
        frames = _innermost_first(main)
        return events.Stacks(time.time_ns(), frames, _sequence(), "", handles, _pending())


def _innermost_first(frame: FrameType | None) -> tuple[str, ...]:
    """Return the frames as "file:line function", at most _MAX_FRAMES."""
    frames: list[str] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(frames)


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


def _text(spec: RankSpec, frames: dict[int, FrameType]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    parts = [f"rank {spec.rank}, attempt {spec.attempt}, pid {os.getpid()}, {when} UTC\n"]
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        thread = threads.get(ident)
        name = thread.name if thread is not None else "a thread that Python did not start"
        parts.append(f"\n{name} (most recent call last):\n" + "".join(traceback.format_stack(frame)))
    return "".join(parts)


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
