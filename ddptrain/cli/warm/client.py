"""Passes this command to a warm process, which runs it with this process's output, signals and exit code.

Standard library only: what this module imports is what a warm command waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from ddptrain.cli.warm.conditions import conditions, process_status

SOCKET = "driver.sock"  # in the folder of a cluster
SWITCH = "DDPTRAIN_WARM_DRIVER"  # "off": each command is a process of its own
READY, ACCEPTED, GO = b"ready", b"accepted", b"go"
_COMMANDS = ("train", "run")
_OWN_PROCESS = ("--ready", "--ordered", "--detach", "--debug")  # options that use what only this process has
_ANSWER_S = 1.0  # a process that does not answer is busy or suspended
_PASSED_ON = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT),
)
_KILLED = 128 + signal.SIGKILL
_MAX_MESSAGE_BYTES = 4096


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Run the command in a warm process; return its exit code, or None if this process must run it itself."""
    if not _is_suitable(argv, environ):
        return None
    state = environ.get("XDG_STATE_HOME", "").strip() or os.path.join(environ.get("HOME", ""), ".local", "state")
    folder = os.path.join(state, "ddptrain", "clusters")
    request: bytes | None = None
    for connection in _connections(folder, argv):
        with connection:
            request = request or _request(argv, environ)
            if (code := _ask(connection, request)) is not None:
                return code
    return None


def _is_suitable(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the command may run in another process that has the same standard streams."""
    if sys.platform != "linux" or environ.get(SWITCH) == "off" or not argv or argv[0] not in _COMMANDS:
        return False
    if any(word.startswith(_OWN_PROCESS) for word in argv):
        return False
    if not all(os.path.isabs(entry) for entry in environ.get("PYTHONPATH", "/").split(os.pathsep)):
        return False  # relative to the working directory at the start
    return all(os.path.exists(f"/proc/self/fd/{fd}") for fd in range(3)) and not _has_more_files()


def _has_more_files() -> bool:
    """Return whether the shell has opened more files for the command, as for `train <(cat a.yaml)`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is closed
            if int(name) > 2 and os.get_inheritable(int(name)):
                return True
    return False


def _connections(clusters: str, argv: Sequence[str]) -> Iterator[socket.socket]:
    """Yield the connections to warm processes of this user's clusters; that of the named cluster is first."""
    words = {word.removeprefix("--cluster=") for word in argv}
    try:
        names = sorted(os.listdir(clusters), key=lambda name: (name not in words, name))
    except OSError:
        return
    for name in names:
        if (connection := _connected(os.path.join(clusters, name))) is not None:
            yield connection


def _connected(folder: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with private_folder(folder) as path:
            connection.settimeout(_ANSWER_S)
            connection.connect(f"{path}/{SOCKET}")
            return connection
    except OSError:
        connection.close()
        return None


@contextlib.contextmanager
def private_folder(folder: str) -> Iterator[str]:
    """Open a folder; yield a short path to it. Raises PermissionError if others than this user can enter it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{folder} must belong to this user alone")
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _request(argv: Sequence[str], environ: Mapping[str, str]) -> bytes:
    status = process_status()
    ignored = [int(number) for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    return json.dumps(
        {
            "argv": [sys.argv[0], *argv],
            "environ": dict(environ),
            "umask": int(status["Umask"], 8),
            "ignored": ignored,
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "conditions": conditions(environ),
        }
    ).encode()


def _ask(connection: socket.socket, request: bytes) -> int | None:
    """Send the request; wait for the end of the command if it is accepted. None if it is not."""
    cwd = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    memory = os.memfd_create("ddptrain-request", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(request)
        if connection.recv(_MAX_MESSAGE_BYTES) != READY:  # files that wait in the socket would stay open
            return None
        socket.send_fds(connection, [b"command"], [memory, 0, 1, 2, cwd])
        if connection.recv(_MAX_MESSAGE_BYTES) != ACCEPTED:
            return None
    except OSError:  # also TimeoutError; nothing has begun: the other side waits for "go"
        return None
    finally:
        os.close(cwd)
        os.close(memory)
    connection.settimeout(None)
    _pass_on_signals(connection)
    try:
        connection.send(GO)
        answer = connection.recv(_MAX_MESSAGE_BYTES)
    except OSError:
        answer = b""
    return _end_as(int(answer)) if answer else _KILLED


def _pass_on_signals(connection: socket.socket) -> None:
    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # the command has just ended
            connection.send(str(int(number)).encode())

    def suspend(number: int, frame: FrameType | None) -> None:
        pass_on(signal.SIGSTOP, frame)
        os.kill(os.getpid(), signal.SIGSTOP)

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = dict.fromkeys(_PASSED_ON, pass_on)
    for number, handler in (handlers | {signal.SIGTSTP: suspend}).items():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _end_as(code: int) -> int:
    """Return the exit code of the command; end by the signal (-code) that has ended it."""
    if code >= 0:
        return code
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code
