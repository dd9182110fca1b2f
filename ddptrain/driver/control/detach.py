"""Starts a driver in its own session. The process that starts it can end when the run has begun.

The driver's output goes into a pipe to that process. When its run directory exists, the driver writes a line about the
run into the pipe, and closes it: from then on its output goes into driver.log.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain import ci
from ddptrain.driver.observers import OPENED
from ddptrain.errors import ClusterError, ExitCode, UsageError
from ddptrain.results.run import Run
from ddptrain.results.secure_files import open_to_append

READY_OPTION = "--ready"
_MARK = b"ddptrain-begun "  # the line about the run begins so
_BEGIN_DEADLINE_S = 120.0  # time for imports, and for requests to the object store of the runs
_END_DEADLINE_S = 10.0
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Begun:
    """A detached driver whose run directory exists.

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

    What the driver prints before its run has begun is written to stderr. The caller must wait for the process. Raises
    ClusterError if the run does not begin in time.
    """
    process = subprocess.Popen(
        [*_program(), *arguments[:1], READY_OPTION, *arguments[1:]],
        stdin=subprocess.PIPE if request else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
        before, mark, after = _read_all(process.stdout.fileno(), deadline_s).partition(_MARK)
        if mark:
            print(before.decode(errors="replace"), end="", file=sys.stderr, flush=True)
            return process, Begun(**json.loads(after.partition(b"\n")[0]))
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        return process, EndedEarly(process.wait(_END_DEADLINE_S) or ExitCode.INTERNAL, before.decode(errors="replace"))
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_DEADLINE_S)
        process.kill()
        process.wait()
        raise
    finally:
        process.stdout.close()


def _program() -> list[str]:
    return [sys.executable, "-P", "-m", "ddptrain"]


def _read_all(descriptor: int, deadline_s: float) -> bytes:
    """Read until the other end is closed. Raises ClusterError at the deadline."""
    deadline = time.monotonic() + deadline_s
    blocks: list[bytes] = []
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (block := os.read(descriptor, _BLOCK_BYTES)):
            return b"".join(blocks)
        blocks.append(block)
    raise ClusterError(f"the detached driver has not begun its run within {deadline_s:g} s; try it without --detach")


# --- the driver ---


class ReportBegun:
    """A run observer of a detached driver: reports that the run has begun, or was done, and redirects the output.

    Raises ResultsError if the log of the driver can't be written.
    """

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Write the line about the run that is opened to stdout; redirect stdout and stderr to its driver.log."""
        if event["event"] != OPENED:
            return
        layout, done = Run(Path(event["folder"])), event["done"]
        descriptor = os.open(os.devnull, os.O_WRONLY) if done else open_to_append(layout.driver_log)
        log_from = layout.driver_log.lstat().st_size if os.path.lexists(layout.driver_log) else 0
        log = layout.shown_path(layout.driver_log)
        host = socket.gethostname()
        begun = Begun(event["run_id"], event["run_dir"], os.getpid(), host, log, event["reason"], log_from, done)
        with suppress(OSError):  # the waiting process may have ended
            print(_MARK.decode() + json.dumps(dataclasses.asdict(begun)), flush=True)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
        os.close(descriptor)

    def on_end(self, run: Run) -> None:
        """Do nothing: nobody waits for the end."""


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
