"""Starts the command `ddptrain` by fork, from a process that has imported it already.

A start of Python that imports ddptrain and Dask takes 0.4 to 1.0 s of CPU time, a fork 0.03 s, and the integration
tests start the command more than 500 times. The forked process has its own session, environment, working directory,
stdin, stdout and stderr. It runs `ddptrain.__main__` as `__main__`; signals, exit handlers and exit codes are those of
a real start. Its workers and rank servers are forked, too: see child_forks.py. What only a real start can show (import
path, environment in /proc) is tested with one: see `real_start` in conftest.py.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from ddptrain.cli.warm.server import import_driver
from ddptrain.rank import process_control
from ddptrain.rank.warmup import import_everything
from ddptrain.worker.rank_environment import tuned_defaults
from tests.child_forks import (
    LENGTH,
    ChildForks,
    Forks,
    HiddenModules,
    be_child,
    become_program,
    can_fork_siblings,
    changed_at_start,
    fork_sibling,
    read_order,
    run_program,
    send_order,
)

_STATUS = struct.Struct("!i")
# What runs on clusters and other commands import, beside the driver.
_MODULES = (
    "distributed",
    "ddptrain.clusters.status",
    "ddptrain.clusters.scheduler.slots",
    "ddptrain.results.show.render",
    "ddptrain.retrain.retraining",
    "ddptrain.worker.rank_host",
    "ddptrain.worker.rank_task",
)
# What Dask's schedulers and workers import.
_DASK_MODULES = ("distributed", "ddptrain.worker.rank_host", "ddptrain.worker.rank_task")
# Bytes for the command lines of forked processes in /proc, and for variables that the server does not have.
_TITLE_ROOM, _ENVIRONMENT_ROOM = 2000, 4000


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a forked process behaves as one started with `environment`: equal values of what is read at a start."""
    return not changed_at_start(environment, os.environ)


class ForkedProcess:
    """A process of the fork server, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, args: Sequence[str], pid: int, status: int) -> None:
        self.args, self.pid = list(args), pid
        self.returncode: int | None = None
        self._status, self._lock = status, threading.Lock()

    def poll(self) -> int | None:
        """The exit code, as `subprocess.Popen` has it; None while the process runs."""
        self._read(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._read(left)
            if left == 0.0 and self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout_s: float | None) -> None:
        with self._lock:
            if self.returncode is not None:  # another thread has read it
                return
            if select.select([self._status], [], [], timeout_s)[0]:
                told = os.read(self._status, _STATUS.size)
                os.close(self._status)
                assert len(told) == _STATUS.size, "the fork server has ended"
                self.returncode = os.waitstatus_to_exitcode(*_STATUS.unpack(told))


class ForkServer:
    """The process that forks; it ends when the pytest process closes the connection or ends."""

    def __init__(self, *, only_dask: bool = False) -> None:
        """With `only_dask` it imports what schedulers and workers need, but no torch: in a third of the time."""
        what = "dask" if only_dask else "all"
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), what, "-" * _TITLE_ROOM],
                cwd=Path(__file__).parent.parent,
                env={**_spare(), **os.environ, "ROOM": "-" * _ENVIRONMENT_ROOM},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # sys.stdout of each forked process is buffered as that of a file
                pass_fds=[theirs.fileno()],
            )
        self._socket, self._lock = ours, threading.Lock()

    @property
    def pid(self) -> int:
        """Of the process that forks."""
        return self._process.pid

    def start(
        self, args: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> ForkedProcess:
        """Start `python -m ddptrain ARGS` in a session of its own, with an empty stdin."""
        words = [sys.executable, "-m", "ddptrain", *args]
        order = {"module": "ddptrain", "args": list(args), "cwd": str(cwd), "env": dict(env), "words": words}
        status, told = os.pipe()
        try:
            with self._lock, open(os.devnull, "rb") as nothing:
                fds = [nothing.fileno(), stdout.fileno(), stderr.fileno(), told]
                pid = send_order(self._socket, {**order, "safe": False}, fds)
        finally:
            os.close(told)
        return ForkedProcess(["ddptrain", *args], pid, status)

    def start_child(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Start a process that is a child of this one; returns its pid."""
        with self._lock:
            return send_order(self._socket, {**order, "sibling": True}, fds)

    def close(self) -> None:
        """End the server; processes that it has forked go on."""
        self._socket.close()
        self._process.wait(30)


class ServerForks(Forks):
    """Processes that this process starts are forked by a fork server."""

    def __init__(self, server: ForkServer, environment: Mapping[str, str] = os.environ) -> None:
        """Processes with `environment` are forked although the server has that of pytest."""
        super().__init__({**_spare(), **environment}, _spare())
        self._server = server

    def _is_known(self, module: str) -> bool:
        return module == "-c" or super()._is_known(module)

    def start(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Have the server fork; returns the pid of the new process, a child of this one."""
        return self._server.start_child(order, fds)


def _spare() -> dict[str, str]:
    """Variables with which a worker starts its rank server."""
    return {**tuned_defaults(), "OPENBLAS_NUM_THREADS": "1"}


# --- in the process of the server ---


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each order. Returns the order in each forked process, which has to run it; the server itself exits."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they are for the tests
        signal.signal(number, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}  # pid -> the pipe that its exit status goes to
    waiting: list[socket.socket | int] = [connection, woken]
    while True:
        ready, _, _ = select.select(waiting, [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(running)
        if connection in ready:
            try:
                order, fds = read_order(connection)
            except (EOFError, ConnectionError):
                sys.exit(0)
            sibling = order.get("sibling", False)
            pid = fork_sibling() if sibling else os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.detach()  # it is closed with all other descriptors
                (be_child if sibling else _become)(order, fds)
                return order
            if not sibling:
                running[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
            connection.sendall(LENGTH.pack(pid))


def _report_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(BrokenPipeError):  # the test does not ask any more
            os.write(running[pid], _STATUS.pack(status))
        os.close(running.pop(pid))


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """Make the forked process what a real start would have made it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    become_program(order)


def _without_folders() -> Callable[[], None]:
    """Delete the folders that wandb makes when it is imported. Returns what makes others: each process has its own."""
    from wandb import Artifact
    from wandb.sdk.data_types import _private as media

    folders = [Artifact._TMP_DIR, media.MEDIA_TMP]
    for folder in folders:
        atexit.unregister(folder.cleanup)
        folder.cleanup()

    def make() -> None:
        for folder in folders:
            folder.__init__("wandb")  # type: ignore[misc]  # it has the finalizer that removes it, too

    return make


def _main() -> NoReturn:
    del sys.path[0]  # the folder of the tests
    del os.environ["ROOM"]
    environment = dict(os.environ)
    process_control.name_process("python", " ".join(sys.orig_argv[:4]))  # the first call finds the space for titles
    gc.disable()  # there is nothing to collect while modules are imported
    only_dask = sys.argv[2] == "dask"
    for name in _DASK_MODULES if only_dask else _MODULES:
        importlib.import_module(name)
    if not only_dask:
        import_driver()
        import_everything()
        importlib.import_module(
            "wandb.sdk.launch"
        )  # wandb.init imports it: 1.2 s of CPU time for each rank, with wandb
        HiddenModules("wandb", _without_folders())
    hidden = HiddenModules("torch")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # folders of tests may have modules of this name
    gc.freeze()  # fewer pages to copy after a fork
    gc.enable()
    assert threading.active_count() == 1, threading.enumerate()
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if can_fork_siblings() and not order.get("code") and process_control.thread_count() == 1:
        ChildForks(environment, _spare(), hidden).install()
    run_program(order)


if __name__ == "__main__":
    _main()
