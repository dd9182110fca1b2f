"""Starts ranks and stores for the rank server: by a fork if this is equivalent to a fresh process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ddptrain.protocol.exec_env import exec_only, python_command
from ddptrain.rank.server import process_control

_READ_AT_START = exec_only(os.environ)  # before torch is imported, which sets variables itself


def start_rank(
    spec_fd: int, log_fd: int, events_fd: int, commands_fd: int, *, why_cold: str, close: Sequence[int]
) -> tuple[int, str]:
    """Start the rank whose spec is in the open file `spec_fd`. Return its pid and how it was started, for the log.

    `commands_fd` is the read end of the pipe for commands. `why_cold` is the reason why this process must not fork, ""
    if it may. `close` lists the descriptors that a forked child must close.
    """
    from ddptrain.rank import rank_process

    os.lseek(spec_fd, 0, os.SEEK_SET)
    spec = rank_process.read_spec(spec_fd)
    if not why_cold and (names := _differing(exec_only(spec.env), _READ_AT_START)):
        why_cold = f"only a new process reads {', '.join(names)}"
    if not why_cold:
        kept = {log_fd, events_fd, commands_fd}
        closed = {*close, spec_fd} - kept
        return _fork(lambda: rank_process.run_rank(spec, log_fd, events_fd, commands_fd), closed), "forked"
    os.lseek(spec_fd, 0, os.SEEK_SET)
    return _start_cold(spec.env, (spec_fd, log_fd, events_fd, commands_fd), why_cold), f"cold: {why_cold}"


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names whose values differ, or that are in only one of the mappings."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def start_store(host: str, port: int, listen_fd: int, *, close: Sequence[int]) -> int:
    """Start a process that hosts a TCPStore on a listening socket. Return its pid."""
    return _fork(lambda: _run_store(host, port, listen_fd), {*close} - {listen_fd})


def _fork(main: Callable[[], int], close: set[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_child(main, close, server)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the child does the same, so that the group exists before either of them continues
    return pid


def _become_child(main: Callable[[], int], close: set[int], server: int) -> NoReturn:
    """Run `main` in the forked child, without the server's signal handlers and descriptors. Never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        process_control.die_with_parent(server)
        signal.set_wakeup_fd(-1)
        gc.enable()
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in every Python program
        for fd in close:
            os.close(fd)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _start_cold(env: Mapping[str, str], fds: tuple[int, int, int, int], why: str) -> int:
    child = subprocess.Popen(
        [*python_command("ddptrain.rank.rank_process"), *map(str, fds), str(os.getpid()), why],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=fds[1],
        stderr=fds[1],
        pass_fds=fds,
        process_group=0,
    )
    child.returncode = 0  # the server itself reaps all children
    return child.pid


def _run_store(host: str, port: int, listen_fd: int) -> int:
    """Host the worker group's TCPStore on a listening socket until SIGTERM."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    process_control.name_process("ddptrain-store", "ddptrain store of a worker group")
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listen_fd))
    signal.pause()
    del store
    return 0
