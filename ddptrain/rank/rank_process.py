"""The process of a rank: redirects its output, sets its environment, runs the rank, and calls exit handlers."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import os
import random
import signal
import sys
import threading
import time
import traceback

from ddptrain.protocol import events
from ddptrain.protocol.commands import CommandReader
from ddptrain.protocol.exec_env import names_working_directory
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.rank_lifecycle import RankLifecycle
from ddptrain.rank.server import process_control

_COLD_START = (
    "ranks start cold, some seconds slower: the environment sets variables that only a fresh program reads "
    "(MALLOC_*, LD_*, PYTHON*, ...), or importing torch started threads"
)


def read_spec(fd: int) -> RankSpec:
    """Return the rank spec in the open file `fd`."""
    with open(fd, encoding="utf-8", closefd=False) as file:
        return RankSpec.from_json(file.read())


def run_rank(spec: RankSpec, log_fd: int, events_fd: int, commands_fd: int, *, cold: bool = False) -> int:
    """Run the workload in this process. Return the exit code. Must be called once per process.

    The driver's commands are read from `commands_fd`. `cold`: this is a fresh process, not a fork of the warm rank
    server; the user gets a note with the reason.
    """
    process_control.name_process(f"ddptrain-rank{spec.rank}", f"ddptrain rank {spec.rank} of {spec.run_id}")
    _redirect_output(log_fd)
    emitter = Emitter(events_fd)
    if cold and spec.rank == 0:
        emitter.emit(events.Note(time.time_ns(), _COLD_START))
    _enter_environment(spec)
    rank = RankLifecycle(spec, emitter, CommandReader(commands_fd))
    try:
        code = rank.run()
        rank.tracked.bound_exit(code)
    finally:
        _run_exit_handlers()
    return code


def _redirect_output(log_fd: int) -> None:
    """Redirect stdout and stderr, also of C libraries and child processes, to the log, without buffering."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for fd in (1, 2):
        os.dup2(log_fd, fd, inheritable=True)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # open until the process ends
    sys.stdout, sys.stderr = _unbuffered(1, "<stdout>"), _unbuffered(2, "<stderr>")
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    faulthandler.enable(file=2)


def _unbuffered(fd: int, name: str) -> io.TextIOWrapper:
    """Return a text stream without a buffer, because SIGKILL would lose its content."""
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = name
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
    stream.mode = "w"  # type: ignore[misc]  # Python's own streams have it
    return stream


def _enter_environment(spec: RankSpec) -> None:
    """Give this process the environment, working directory and import path of the rank."""
    os.environ.clear()
    os.environ.update(spec.env)
    os.chdir(spec.code.workdir)
    # For a script, script.run() adds only the script's own folder, as the first entry.
    entries = [*(spec.code.sys_path if not spec.code.script else ())]
    if names_working_directory(spec.env) and spec.code.workdir not in entries:
        entries.append(spec.code.workdir)
    kept = [entry for entry in sys.path if entry not in entries]
    sys.path[:] = [*kept, *entries] if spec.code.built_in else [*entries, *kept]
    importlib.invalidate_caches()
    sys.argv = [spec.code.workload]
    random.seed()
    time.tzset()


def _run_exit_handlers() -> None:
    """Call exit handlers as the interpreter does, but no C++ destructors, which can abort a finished rank."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # joins the user's threads, as Python does at exit
        atexit._run_exitfuncs()  # noqa: SLF001
    except BaseException:
        traceback.print_exc()
    _flush_files()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _flush_files() -> None:
    """Write the buffers of open files, as the interpreter does at exit: the user's code may have left files open."""
    for each in gc.get_objects():
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(OSError, ValueError):
                each.flush()


def main() -> None:
    """Run a rank after a cold start. Arguments: the descriptors of the spec, the log, the events and the commands."""
    spec_fd, log_fd, events_fd, commands_fd = (int(fd) for fd in sys.argv[1:5])
    process_control.die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the rank server may ignore it
    code = 70
    try:
        code = run_rank(read_spec(spec_fd), log_fd, events_fd, commands_fd, cold=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
