"""Speaks for a rank that can't: it is stopped, compiled code does not let its Python run, or it has ended.

What is said goes into the rank's own events file, a line at a time, and what is handed over into its staging folder:
the driver takes both as if they came from the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import threading
import time
from pathlib import Path

from ddptrain.protocol import error_file, events
from ddptrain.protocol.rank_spec import ERROR_FILE, STACKS_DUMP, STACKS_SIGNAL, RankSpec, stacks_path
from ddptrain.worker.procfs import Vitals, catches
from ddptrain.worker.spool import RankSpool

_ANSWER_S = 1.5  # for the rank itself to tell where it is
_DUMP_S = 2.0  # for C code to write stacks
_DUMPED_S = 0.15  # without another byte: it has written them
_LOOK_S = 0.05
_TAIL_BYTES = 256 << 10
_STOPPED = "Tt"
_WORDS = {"T": "stopped", "t": "stopped", "D": "uninterruptible"}
_EXPLAINED = {
    "stopped": "the process is stopped (SIGSTOP, or a debugger): its stacks can't be had",
    "uninterruptible": "the process waits in the kernel and takes no signal, as with a file system that is gone",
    "busy": "Python did not run, so these stacks were written by C code; the main thread comes last",
}
_DUMPED_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_NCCL_TIMED_OUT = b"Watchdog caught collective operation timeout"
FLIGHT_RECORD = "flight-record-"  # a rank's number is added; in its staging folder


def stand_by(spool: RankSpool, pid: int, attempt: int, rank: int) -> None:
    """A rank is about to be asked for its stacks: tell what can be told from outside where it does not answer."""
    words = (spool, pid, attempt, rank, _size(spool.events))
    threading.Thread(target=_answer, args=words, name="ddptrain-standin", daemon=True).start()


def _answer(spool: RankSpool, pid: int, attempt: int, rank: int, told: int) -> None:
    vitals = Vitals(pid)
    deadline = time.monotonic() + _ANSWER_S
    while vitals.state() not in _STOPPED and time.monotonic() < deadline:
        if b'{"event":"stacks"' in _tail(spool.events, told):
            return
        time.sleep(_LOOK_S)
    if not (letter := vitals.state()):
        return  # it has ended
    state = _WORDS.get(letter, "busy")
    dump = _dump(spool, pid) if state == "busy" else ""
    _announce(spool, events.Stacks(time.time_ns(), _main_frames(dump), state=state))
    text = f"rank {rank}, attempt {attempt}, pid {pid}\n{_EXPLAINED[state]}\n\n{dump}"
    staged = f"stacks-standin-{time.time_ns()}"
    (spool.staging / staged).write_text(text, encoding="utf-8")
    _hand_over(spool, stacks_path(attempt, rank), staged)


def _dump(spool: RankSpool, pid: int) -> str:
    """What faulthandler writes in the rank."""
    path = spool.staging / STACKS_DUMP
    before = _size(path)
    if not catches(pid, STACKS_SIGNAL):
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    deadline, grown = time.monotonic() + _DUMP_S, time.monotonic()
    size = before
    while time.monotonic() < min(deadline, grown + _DUMPED_S if size > before else deadline):
        time.sleep(_LOOK_S)
        if (now := _size(path)) != size:
            size, grown = now, time.monotonic()
    return _tail(path, before).decode("utf-8", "replace")


def _main_frames(dump: str) -> tuple[str, ...]:
    """Frames of the last thread, which is the main one."""
    _, _, last = dump.rpartition("(most recent call first):\n")
    found = [match for line in last.splitlines() if (match := _DUMPED_FRAME.match(line))]
    return tuple(f"{frame['file']}:{frame['line']} {frame['function']}" for frame in found)


def hand_over_flight_record(spool: RankSpool, spec: RankSpec) -> None:
    """Hand over what NCCL's flight recorder has left, if it has."""
    name = f"{FLIGHT_RECORD}{spec.rank}"
    if (spool.staging / name).is_file():
        again = f".attempt-{spec.attempt}" if spec.attempt > 1 else ""
        _hand_over(spool, f"flight-recorder/rank-{spec.rank}{again}.pickle", name)


def hand_over_error(spool: RankSpool, status: int) -> None:
    """Tell of the error that a script has written down before it ended without another word."""
    if status != 0 and (failure := error_file.take(spool.staging / ERROR_FILE)) is not None:
        _announce(spool, dataclasses.replace(failure, exit_code=status if status > 0 else None))


def timed_out(spool: RankSpool) -> bool:
    """Whether NCCL has ended the rank because a collective operation took too long: its last words say so."""
    return _NCCL_TIMED_OUT in _tail(spool.log, max(0, _size(spool.log) - _TAIL_BYTES))


def _hand_over(spool: RankSpool, path: str, staged: str) -> None:
    with (spool.staging / staged).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    _announce(spool, events.FileSaved(time.time_ns(), path, staged, size, digest))


def _announce(spool: RankSpool, event: events.Event) -> None:
    fd = os.open(spool.events, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, events.encode(event))  # in one piece, as the rank's own
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
