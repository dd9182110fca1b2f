"""A driver in a session of its own: started by one process, which leaves once the run has begun."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ddptrain.errors import ClusterError, ExitCode
from ddptrain.file_ops import write_all
from ddptrain.results.errors import naming
from ddptrain.results.files import open_to_append
from ddptrain.results.layout import RunLayout

READY_OPTION = "--ready-fd"
_BEGIN_DEADLINE_S = 120.0  # for imports and, where runs are kept in an object store, for that
_END_DEADLINE_S = 10.0
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Begun:
    """What a detached driver tells when its run directory is there; `reason` is why --resume chose that run.

    `log_from` is where in `log` it has begun to write: a run that was resumed has one already. `done`: the run had
    succeeded before, and this process has nothing to do.
    """

    run_id: str
    run_dir: str
    pid: int
    host: str
    log: str
    reason: str
    log_from: int = 0
    done: bool = False


@dataclass(frozen=True, slots=True)
class EndedEarly:
    """A driver that ended before its run had begun: its exit code, and what it said."""

    exit_code: int
    said: str


# --- the process that leaves ---


def start_detached(arguments: Sequence[str], *, deadline_s: float = _BEGIN_DEADLINE_S) -> Begun | EndedEarly:
    """Start `ddptrain ARGUMENTS` in a session of its own, and wait until its run has begun.

    A driver that is still at it when the wait ends, by its deadline or by Ctrl-C, is told to end.

    Raises: ClusterError where it is not ready in time.
    """
    with naming(Path(tempfile.gettempdir())):
        output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 it is closed below
    with output:
        process, ready = _start(arguments, output, subprocess.DEVNULL)
        try:
            line = _read_line(ready, deadline_s)
            if not line:
                return EndedEarly(process.wait(_END_DEADLINE_S) or ExitCode.INTERNAL, _said(output.fileno()))
            process.returncode = 0  # it goes on without us: nobody is to wait for it
            return Begun(**json.loads(line))
        except BaseException:
            _end(process)
            raise
        finally:
            os.close(ready)


def start_ordered(
    arguments: Sequence[str], order: bytes, *, deadline_s: float = _BEGIN_DEADLINE_S
) -> tuple[subprocess.Popen[bytes], Begun | EndedEarly]:
    """The same, with an order in the driver's standard input, which stays open; the caller is to wait for the process.

    Raises: ClusterError where it is not ready in time.
    """
    with naming(Path(tempfile.gettempdir())):
        output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 it is closed below
    with output:
        process, ready = _start(arguments, output, subprocess.PIPE)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(order)
                process.stdin.flush()
            line = _read_line(ready, deadline_s)
            if not line:
                with suppress(BrokenPipeError):
                    process.stdin.close()
                return process, EndedEarly(process.wait(_END_DEADLINE_S) or ExitCode.INTERNAL, _said(output.fileno()))
            return process, Begun(**json.loads(line))
        except BaseException:
            _end(process)
            raise
        finally:
            os.close(ready)


def _start(arguments: Sequence[str], output: IO[bytes], stdin: int) -> tuple[subprocess.Popen[bytes], int]:
    """The driver, and where it will tell that it is ready."""
    ready, tell = os.pipe()
    try:
        process = subprocess.Popen(
            [*_program(), *arguments[:1], READY_OPTION, str(tell), *arguments[1:]],
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=[tell],
            start_new_session=True,
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(tell)
    return process, ready


def _program() -> list[str]:
    return [sys.executable, "-P", "-m", "ddptrain"]


def _read_line(descriptor: int, deadline_s: float) -> bytes:
    """What stands there before the other end is closed. Raises ClusterError when that takes too long."""
    deadline = time.monotonic() + deadline_s
    line = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        block = os.read(descriptor, _BLOCK_BYTES)
        if not block:
            return line
        line += block
    raise ClusterError(f"the detached driver has not begun its run within {deadline_s:g} s; try it without --detach")


def _said(descriptor: int) -> str:
    """All of a file that others write, whose place in it stays as it is."""
    blocks, at = [], 0
    while block := os.pread(descriptor, _BLOCK_BYTES, at):
        blocks.append(block)
        at += len(block)
    return b"".join(blocks).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        process.wait(_END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- the process that stays ---


def tell_begun(ready: int, layout: RunLayout, reason: str) -> None:
    """Let what this process prints go to the run's driver.log, and tell the process that waits that the run has begun.

    Raises: ResultsError where the log can't be written.
    """
    _tell(ready, _begun(layout, reason, _print_into(layout.driver_log)))


def tell_done(ready: int, layout: RunLayout, reason: str) -> None:
    """Tell the process that waits that the run has succeeded before, and that nothing is started."""
    log_from = layout.driver_log.lstat().st_size if os.path.lexists(layout.driver_log) else 0
    _tell(ready, _begun(layout, reason, log_from, done=True))


def _begun(layout: RunLayout, reason: str, log_from: int = 0, *, done: bool = False) -> Begun:
    log = layout.told(layout.driver_log)
    return Begun(layout.root.name, layout.where, os.getpid(), socket.gethostname(), log, reason, log_from, done)


def _tell(ready: int, begun: Begun) -> None:
    with suppress(OSError), os.fdopen(ready, "wb") as told:  # who waited may have been killed: the run goes on
        told.write(json.dumps(dataclasses.asdict(begun)).encode())


def _print_into(log: Path) -> int:
    """Let stdout and stderr go on in the file, after what they have said so far; how long it was before."""
    descriptor = open_to_append(log)
    try:
        with naming(log):
            before = os.fstat(descriptor).st_size
            write_all(descriptor, _said(sys.stdout.fileno()).encode())
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)
    return before
