"""How the rank server starts its children: ranks and stores, forked where that is as good as a fresh program."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ddptrain.protocol.exec_env import exec_only
from ddptrain.rank.server import process_control


def start_rank(spec_fd: int, log_fd: int, events_fd: int, orders_fd: int, *, warm: bool, close: Sequence[int]) -> int:
    """Start the rank whose order is in the file behind `spec_fd`; return its pid.

    `orders_fd` is the end of a pipe that the rank reads orders from; `warm` says that this process may fork; `close`
    are descriptors that a fork must not keep.
    """
    from ddptrain.rank import process

    os.lseek(spec_fd, 0, os.SEEK_SET)
    spec = process.read_spec(spec_fd)
    if warm and exec_only(spec.env) == exec_only(os.environ):
        kept = {log_fd, events_fd, orders_fd}
        return _fork(lambda: process.run_rank(spec, log_fd, events_fd, orders_fd), {*close, spec_fd} - kept)
    os.lseek(spec_fd, 0, os.SEEK_SET)
    return _start_cold(spec.env, (spec_fd, log_fd, events_fd, orders_fd))


def start_store(host: str, port: int, listen_fd: int, *, close: Sequence[int]) -> int:
    """Start a process that hosts a TCPStore on a listening socket; return its pid."""
    return _fork(lambda: _run_store(host, port, listen_fd), {*close} - {listen_fd})


def _fork(main: Callable[[], int], close: set[int]) -> int:
    pid = os.fork()
    if pid == 0:
        _become_child(main, close)
    _lead_group(pid)
    return pid


def _lead_group(pid: int) -> None:
    try:
        os.setpgid(pid, pid)  # also done by the child: whoever comes first
    except OSError:
        pass


def _become_child(main: Callable[[], int], close: set[int]) -> NoReturn:
    """In the fresh fork: leave everything of the server behind, run `main`, and never return."""
    code = 70
    try:
        os.setpgid(0, 0)
        process_control.die_with_parent()
        signal.set_wakeup_fd(-1)
        gc.enable()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for fd in close:
            os.close(fd)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _start_cold(env: Mapping[str, str], fds: tuple[int, int, int, int]) -> int:
    command = [sys.executable, "-P", "-m", "ddptrain.rank.process", *(str(fd) for fd in fds)]
    child = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=fds[1],
        stderr=fds[1],
        pass_fds=fds,
        process_group=0,
    )
    child.returncode = 0  # the server reaps every child itself
    return child.pid


def _run_store(host: str, port: int, listen_fd: int) -> int:
    """Host the gang's TCPStore on a listening socket until this process is told to end."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    process_control.name_process("ddptrain-store")
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listen_fd))
    signal.pause()
    del store
    return 0
