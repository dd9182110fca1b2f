"""Reports about a rank: its stacks, also if it is stopped or compiled code blocks Python, and why it has ended.

The events are appended to the rank's events file, and the files are written to its staging folder. The driver handles
both as if they came from the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from ddptrain.file_ops import hash_file, open_append, text_or_empty
from ddptrain.protocol import events
from ddptrain.protocol.events import users_frame, waits_in
from ddptrain.protocol.rank_errors import is_lost_peer, is_time_out, read_error_file
from ddptrain.protocol.rank_spec import ERROR_FILE, STACKS_DUMP, STACKS_END, STACKS_SIGNAL, RankSpec, stacks_path
from ddptrain.worker.rank_environment import FLIGHT_RECORD
from ddptrain.worker.spool import RankSpool

_ANSWER_S = 1.5  # time for the rank itself to write its stacks
_DUMP_S = 2.0  # time for faulthandler to write the stacks
_DUMP_QUIET_S = 0.15  # the dump is complete if it has not grown for this long
_POLL_S = 0.05
_TAIL_BYTES = 256 << 10
_LONGEST_REASON = 1_000  # characters
_STATES = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_DISK_SLEEP: "uninterruptible",
}
_EXPLANATIONS = {
    "": "innermost frame first; the main thread comes last",
    "stopped": "the process is stopped (SIGSTOP, or a debugger): its stacks cannot be read",
    "uninterruptible": "the process waits in the kernel and takes no signal, as with a file system that hangs",
    "busy": "Python did not run, so these stacks were written by C code; the main thread comes last",
}
_UNKNOWN: dict[str, Any] = {"sequence": None, "handles": "", "pending": ""}
_DUMPED_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_CPP_EXCEPTION = re.compile(rb"terminate called after throwing an instance of '([^'\n]*)'\n  what\(\):  ([^\n]*)")
_NCCL_TIMED_OUT = "Watchdog caught collective operation timeout"
# Why a thread of NCCL's process group calls abort() itself, with torch's backend nccl2.
_NCCL_ABORTED = re.compile(rb"Aborting process on rank \d+ due to ([^\n]*)")


def report_stacks(spool: RankSpool, pid: int, attempt: int, rank: int) -> None:
    """Report the stacks of a rank, in a thread. Must be called before the rank is asked to write them."""
    arguments = (spool, pid, attempt, rank, _size(spool.staging / STACKS_DUMP))
    threading.Thread(target=_report_stacks, args=arguments, name="ddptrain-stacks", daemon=True).start()


def _report_stacks(spool: RankSpool, pid: int, attempt: int, rank: int, dump_from: int) -> None:
    dump, known = _own_dump(spool, pid, dump_from)
    if known is None and not (status := _status(pid)):
        return  # the rank has ended
    state = "" if known is not None else _STATES.get(status, "busy")
    if state == "busy":
        dump = _dump_by_signal(spool, pid)
    heading = f"rank {rank}, attempt {attempt}, pid {pid}\n{_EXPLANATIONS[state]}\n\n"
    staged = f"stacks-{time.time_ns()}"
    (spool.staging / staged).write_text(heading + dump, encoding="utf-8")
    _announce_file(spool, stacks_path(attempt, rank), staged)
    fields = {name: (known or {}).get(name, default) for name, default in _UNKNOWN.items()}
    _emit(spool, events.Stacks(time.time_ns(), _main_frames(dump), state=state, **fields))


def _own_dump(spool: RankSpool, pid: int, dump_from: int) -> tuple[str, dict[str, Any] | None]:
    """Return the stacks that the rank writes by itself, and what it knows; None if it writes nothing in time."""
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline and _STATES.get(_status(pid)) != "stopped":
        dump, end, line = _tail(spool.staging / STACKS_DUMP, dump_from).decode("utf-8", "replace").partition(STACKS_END)
        if end and line.endswith("\n"):
            with contextlib.suppress(ValueError, TypeError):
                return dump, dict(json.loads(line))
        time.sleep(_POLL_S)
    return "", None


def _dump_by_signal(spool: RankSpool, pid: int) -> str:
    """Return the stacks that faulthandler writes in the rank; "" if the rank has no handler for the signal."""
    path = spool.staging / STACKS_DUMP
    before = _size(path)
    if not _has_handler(pid, STACKS_SIGNAL):
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    deadline, grown_at = time.monotonic() + _DUMP_S, time.monotonic()
    size = before
    while time.monotonic() < min(deadline, grown_at + _DUMP_QUIET_S if size > before else deadline):
        time.sleep(_POLL_S)
        if (now := _size(path)) != size:
            size, grown_at = now, time.monotonic()
    return _tail(path, before).decode("utf-8", "replace")


def _status(pid: int) -> str:
    """Return the state of a process in psutil's terms, such as "running" or "stopped"; "" if it has ended."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""


def _has_handler(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal; without one the signal would end the process."""
    lines = text_or_empty(Path(f"/proc/{pid}/status")).splitlines()
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)


def _main_frames(dump: str) -> tuple[str, ...]:
    """Return the frames of the main thread, which is the last one in the dump; () if it has too many threads."""
    return () if dump.endswith("\n...\n") else _frames(dump.rpartition("(most recent call first):\n")[2])


def _frames(dumped: str) -> tuple[str, ...]:
    frames = [match for line in dumped.splitlines() if (match := _DUMPED_FRAME.match(line))]
    return tuple(f"{frame['file']}:{frame['line']} {frame['function']}" for frame in frames)


def announce_flight_record(spool: RankSpool, spec: RankSpec) -> None:
    """Announce the file of NCCL's flight recorder to the driver, if there is one."""
    name = f"{FLIGHT_RECORD}{spec.rank}"
    if (spool.staging / name).is_file():
        suffix = f".attempt-{spec.attempt}" if spec.attempt > 1 else ""
        _announce_file(spool, f"flight-recorder/rank-{spec.rank}{suffix}.pickle", name)


def report_error_file(spool: RankSpool, status: int) -> None:
    """Report the error that a failed script has written into its error file before it ended without an event."""
    if status != 0 and (failure := read_error_file(spool.staging / ERROR_FILE)) is not None:
        _emit(spool, dataclasses.replace(failure, exit_code=status if status > 0 else None))


def why_aborted(spool: RankSpool) -> str:
    """Type and first line of the C++ exception that has aborted the rank, or NCCL's reason; "" if its log has none."""
    tail = _log_tail(spool)
    exceptions = [b": ".join(found) for found in _CPP_EXCEPTION.findall(tail)] or _NCCL_ABORTED.findall(tail)
    return exceptions[-1].decode("utf-8", "replace")[:_LONGEST_REASON] if exceptions else ""


def waited_for_peer(spool: RankSpool) -> tuple[bool, bool]:
    """Whether SIGABRT ended the rank because a collective operation timed out, or because it lost another rank.

    Its log says why, or its messages are unknown and a thread that is not Python's has called abort() while the main
    thread was in a collective operation, as NCCL's threads do. Then it is a time-out if there was no C++ exception; but
    in a backward pass and a synchronization, the abort may also be that of a kernel.
    """
    why, tail = why_aborted(spool), _log_tail(spool).decode("utf-8", "replace")
    of_torch = why.startswith(("c10::", "gloo::"))
    if why.startswith("timeout - ") or _NCCL_TIMED_OUT in tail or (of_torch and is_time_out(why)):
        return True, False
    if why.startswith("error - ") or (of_torch and is_lost_peer(why)):
        return False, True
    _, is_crash, dump = tail.rpartition("Fatal Python error: ")
    operation = waits_in(_main_frames(dump)) if is_crash and "\nCurrent thread " not in dump else ""
    late = bool(operation) and not why and operation not in ("backward", "synchronize")
    return late, bool(operation) and not late


def crash_place(spool: RankSpool) -> str:
    """Return the user's frame in the stacks that faulthandler has written into the log, as "train.py:3 in load".

    It is that of the thread that crashed; "" if this is not a thread of Python.
    """
    _, is_crash, dump = _log_tail(spool).decode("utf-8", "replace").rpartition("Fatal Python error: ")
    _, _, stacks = dump.partition("\nCurrent thread ")
    return users_frame(_frames(stacks.partition("\n\n")[0])) if is_crash else ""


def _log_tail(spool: RankSpool) -> bytes:
    return _tail(spool.log, max(0, _size(spool.log) - _TAIL_BYTES))


def _announce_file(spool: RankSpool, path: str, staged: str) -> None:
    size, digest = hash_file(spool.staging / staged)
    _emit(spool, events.FileSaved(time.time_ns(), path, staged, size, digest))


def _emit(spool: RankSpool, event: events.Event) -> None:
    fd = open_append(spool.events)
    try:
        os.write(fd, events.encode(event))  # one write, so that lines of the rank do not mix with this one
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""
