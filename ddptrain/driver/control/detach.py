"""Starts a driver in its own session. The process that starts it can end when the run has begun."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ddptrain import ci
from ddptrain.driver.observers import OPENED
from ddptrain.errors import ClusterError, ExitCode, UsageError
from ddptrain.file_ops import write_all
from ddptrain.results.errors import results_errors
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.secure_files import open_to_append

READY_OPTION = "--ready-fd"
_BEGIN_DEADLINE_S = 120.0  # time for imports, and for requests to the object store of the runs
_END_DEADLINE_S = 10.0
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Begun:
    """The message of a detached driver when its run directory exists.

    reason: why --resume chose this run. log_from: the earlier size of `log` in bytes (a resumed run already has one).
    done: the run had already succeeded; the driver starts nothing.
    """

    run_id: str
    run_dir: str
    pid: int
    host: str
    log: str
    reason: str
    log_from: int
    done: bool


@dataclass(frozen=True, slots=True)
class EndedEarly:
    """A driver that ended before its run began: its exit code and its output."""

    exit_code: int
    output: str


# --- the process that starts the driver ---


def start_detached(arguments: Sequence[str], *, deadline_s: float = _BEGIN_DEADLINE_S) -> Begun | EndedEarly:
    """Start `ddptrain ARGUMENTS` in its own session, and wait until its run has begun.

    If the wait ends early (because of the deadline, or Ctrl-C), the driver is stopped. Raises ClusterError if the run
    does not begin in time.
    """
    # The log of a CI job does not contain the output of a detached driver.
    environ = {**os.environ, ci.SWITCH: "off"}
    process, begun = start_ordered(arguments, b"", environ, deadline_s=deadline_s)
    process.returncode = 0  # no code waits for the process, and Popen must not warn
    return begun


def start_ordered(
    arguments: Sequence[str],
    request: bytes,
    environ: Mapping[str, str] | None = None,
    *,
    deadline_s: float = _BEGIN_DEADLINE_S,
) -> tuple[subprocess.Popen[bytes], Begun | EndedEarly]:
    """Start a driver as start_detached does, and write `request` to its stdin, which stays open.

    The caller must wait for the process. Raises ClusterError if the run does not begin in time.
    """
    with results_errors(Path(tempfile.gettempdir())):
        output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 it is closed below
    with output:
        process, ready = _start(arguments, output, subprocess.PIPE if request else subprocess.DEVNULL, environ)
        try:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.write(request)
                    process.stdin.flush()
            if line := _read_line(ready, deadline_s):
                return process, Begun(**json.loads(line))
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            return process, EndedEarly(process.wait(_END_DEADLINE_S) or ExitCode.INTERNAL, _output_of(output.fileno()))
        except BaseException:
            _stop_process(process)
            raise
        finally:
            os.close(ready)


def _start(
    arguments: Sequence[str], output: IO[bytes], stdin: int, environ: Mapping[str, str] | None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the driver; return it, and the pipe that receives its message."""
    ready, tell = os.pipe()
    try:
        process = subprocess.Popen(
            [*_program(), *arguments[:1], READY_OPTION, str(tell), *arguments[1:]],
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=[tell],
            env=environ,
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
    """Read until the other end is closed; return the bytes. Raises ClusterError at the deadline."""
    deadline = time.monotonic() + deadline_s
    line = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        block = os.read(descriptor, _BLOCK_BYTES)
        if not block:
            return line
        line += block
    raise ClusterError(f"the detached driver has not begun its run within {deadline_s:g} s; try it without --detach")


def _output_of(descriptor: int) -> str:
    """Return the content of a file that another process is writing, without changing the position in the file."""
    blocks, at = [], 0
    while block := os.pread(descriptor, _BLOCK_BYTES, at):
        blocks.append(block)
        at += len(block)
    return b"".join(blocks).decode(errors="replace")


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        process.wait(_END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- the driver ---


class ReadyPipe:
    """A run observer of a detached driver: reports to the process that waits that the run has begun, or was done.

    Raises ResultsError if the log of the driver can't be written.
    """

    def __init__(self, ready_fd: int) -> None:
        self._fd = ready_fd

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Redirect stdout and stderr to the run's driver.log when the run is opened, and report it."""
        if event["event"] != OPENED:
            return
        layout, done = RunLayout(Path(event["folder"])), event["done"]
        if not done:
            log_from = _redirect_output(layout.driver_log)
        else:
            log_from = layout.driver_log.lstat().st_size if os.path.lexists(layout.driver_log) else 0
        log = layout.shown_path(layout.driver_log)
        host = socket.gethostname()
        begun = Begun(event["run_id"], event["run_dir"], os.getpid(), host, log, event["reason"], log_from, done)
        with suppress(OSError), os.fdopen(self._fd, "wb") as pipe:  # the waiting process may be gone
            pipe.write(json.dumps(dataclasses.asdict(begun)).encode())

    def on_end(self, run: RunView) -> None:
        """Do nothing: nobody waits for the end."""


def _redirect_output(log: Path) -> int:
    """Redirect stdout and stderr to the file, with their output so far; return its earlier size in bytes."""
    descriptor = open_to_append(log)
    try:
        with results_errors(log):
            before = os.fstat(descriptor).st_size
            write_all(descriptor, _output_of(sys.stdout.fileno()).encode())
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)
    return before


# --- the request of ddptrain.launch to its driver: one line of JSON on stdin ---


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The arguments of a launch, which are not in the command line because they may contain secrets.

    config: the configuration, as if a file in `folder` contained it; None if the command line names a file.
    overrides: texts as for --set. together: the run ends when the program ends.
    """

    config: Mapping[str, Any] | None
    folder: str
    overrides: Sequence[str]
    together: bool

    def to_line(self) -> bytes:
        """Return the line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def read_launch_request() -> LaunchRequest:
    """Read the request of the program that started this process. Raises UsageError if there is none."""
    try:
        request = LaunchRequest(**json.loads(_line()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"--ordered is for ddptrain.launch, which sends a request on stdin: {error}") from error
    if request.together:
        threading.Thread(target=_end_with_program, name="ddptrain-program", daemon=True).start()
    return request


def _line() -> bytes:
    """Read the first line of stdin without sys.stdin, whose lock a blocked thread would hold at exit."""
    line = b""
    while not line.endswith(b"\n") and (block := os.read(0, _BLOCK_BYTES)):
        line += block
    return line


def _end_with_program() -> None:
    while os.read(0, _BLOCK_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
