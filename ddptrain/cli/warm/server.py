"""`python -m ddptrain.cli.warm.server FOLDER`: imports the driver once, and forks it for each command of its user.

It listens on a socket in the cluster's folder, which only this user can open, and ends when its stdin is closed.
Two processes are forked for a command: one runs it, the other supervises it. So commands outlive this process.

    supervisor  "ready"
    command     "command" + fds [request as JSON, stdin, stdout, stderr, working directory]
    supervisor  "accepted", if both processes are equal in `conditions`; it hangs up otherwise
    command     "go", then the numbers of signals; when it hangs up, the forked command is killed
    supervisor  the exit code of the forked command, -N if signal N has ended it
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import setproctitle

from ddptrain.cli.warm.client import ACCEPTED, GO, READY, SOCKET, SWITCH, private_folder
from ddptrain.cli.warm.conditions import conditions
from ddptrain.errors import ExitCode

# What `train` imports up to the end of a run on a running cluster.
_MODULES = (
    "ddptrain.cli.main",
    "ddptrain.clusters.backends.local",
    "ddptrain.clusters.compatibility",
    "ddptrain.clusters.lifecycle",
    "ddptrain.config.load",
    "ddptrain.config.workload_check",
    "ddptrain.driver.attempt",
    "ddptrain.driver.connect",
    "ddptrain.driver.rank_specs",
    "ddptrain.driver.resume",
    "ddptrain.driver.run",
    "ddptrain.driver.reservation",
    "ddptrain.driver.workers",
    "ddptrain.isolated",
    "ddptrain.reports.destinations",
    "ddptrain.results.checkpoints.verification",
    "platformdirs.unix",
    "tornado.platform.asyncio",
)
_MAX_BYTES = 4096
_FDS = 5
_REQUEST_S = 2.0
_BACKLOG = 64
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run: what it was started with, and its stdin, stdout, stderr and working directory."""

    request: dict[str, Any]
    fds: tuple[int, int, int, int]


def main() -> int:
    """Serve until stdin is closed. In a forked command: run it, and return its exit code."""
    if os.environ.get(SWITCH) == "off":
        return 0
    setproctitle.setproctitle(f"ddptrain warm commands of {Path(sys.argv[1]).name}")
    # Before the imports: code that changes meanwhile does not count as loaded. As JSON data, like those of a request.
    own = json.loads(json.dumps(conditions(os.environ)))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy, which Dask imports, would start threads
    import_driver()
    if threads := len(os.listdir("/proc/self/task")) - 1:
        print(f"ddptrain: commands are not warm: the imports of the driver have started {threads} threads", flush=True)
        return ExitCode.CLUSTER
    command = _serve(sys.argv[1], own)
    if command is None:
        return 0
    _enter(command)
    from ddptrain.cli import main as commands

    return commands.main(command.request["argv"][1:])


def import_driver() -> None:
    """Import the modules that commands import, and fill their caches."""
    for name in _MODULES:
        importlib.import_module(name)
    from typer.main import get_command

    from ddptrain.cli import main as commands
    from ddptrain.protocol import events, news
    from ddptrain.results.provenance import installed_versions

    installed_versions()
    news.adapter()
    for kind in events.KINDS:
        events.adapter(kind.encode())
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception, SystemExit):
        _ = commands.Root.table["run"]
        get_command(commands.app)(args=["train", "petnames", "--dry-run"], prog_name=commands.PROGRAM)
    gc.collect()
    gc.freeze()  # commands share these pages


def _serve(folder: str, own: dict[str, Any]) -> Command | None:
    """Accept commands; return None when stdin is closed, and the command in the process that is forked for one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, private_folder(folder) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}/{SOCKET}")
        before = os.umask(0o177)
        listener.bind(f"{path}/{SOCKET}")
        os.umask(before)
        listener.listen(_BACKLOG)
        watched: list[Any] = [listener, 0]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if 0 in ready:
                with contextlib.suppress(OSError):
                    os.unlink(f"{path}/{SOCKET}")
                return None
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    return _supervise(connection, own)


def _supervise(connection: socket.socket, own: dict[str, Any]) -> Command:
    """Check the request, and fork the command; return in the forked process only."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.settimeout(_REQUEST_S)
        connection.send(READY)
        command = _received(connection)
        if command.request["conditions"] != own:
            differ = [name for name, value in own.items() if command.request["conditions"].get(name) != value]
            print(f"ddptrain: a command is not warm: other {', '.join(differ)}", flush=True)
            os._exit(0)
        connection.send(ACCEPTED)
        if connection.recv(_MAX_BYTES) != GO:
            os._exit(0)
        connection.settimeout(None)
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)
            connection.close()
            return command
        _watch(connection, pid)
    except BaseException as error:
        print(f"ddptrain: a command is not warm: {error!r}", flush=True)
        os._exit(1)


def _received(connection: socket.socket) -> Command:
    data, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, _FDS)
    if not data or len(fds) != _FDS:
        raise ConnectionError(f"{len(fds)} files came with the request {data!r}")
    with open(fds[0], "rb") as file:
        file.seek(0)
        request = json.load(file)
    return Command(request, (fds[1], fds[2], fds[3], fds[4]))


def _watch(connection: socket.socket, pid: int) -> NoReturn:
    """Forward signals to the command until its end, and send its exit code; kill it if the client has ended."""
    ended = os.pidfd_open(pid)
    for fd in range(3):
        os.close(fd)  # a pipe to the command must not stay open
    watched: list[Any] = [connection, ended]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if ended in ready:
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        try:
            data = connection.recv(_MAX_BYTES)
        except OSError:
            data = b""
        os.kill(pid, int(data) if data else signal.SIGKILL)
        if not data:
            watched.remove(connection)


def _enter(command: Command) -> None:
    """Set up this forked process like a new process of the command: streams, working directory, environment."""
    request = command.request
    os.setpgid(0, 0)
    for fd, given in enumerate(command.fds[:3]):
        os.dup2(given, fd, inheritable=True)
    os.fchdir(command.fds[3])
    for given in command.fds:
        os.close(given)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.umask(request["umask"])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    time.tzset()
    tempfile.tempdir = None
    sys.argv = request["argv"]
    setproctitle.setproctitle(" ".join(["ddptrain", *sys.argv[1:]]))
    sys.stdin = sys.__stdin__ = open(0, closefd=False, errors=sys.stdin.errors)  # type: ignore[misc]  # noqa: SIM115  # open until the end
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)  # type: ignore[misc]


def _stream(fd: int, like: TextIO) -> io.TextIOWrapper:
    """Return a standard stream as the interpreter opens it."""
    lines = fd == 2 or os.isatty(fd)
    return open(fd, "w", buffering=1 if lines else -1, encoding=like.encoding, errors=like.errors, closefd=False)


if __name__ == "__main__":
    sys.exit(main())
