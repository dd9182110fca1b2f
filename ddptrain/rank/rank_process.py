"""The process of a rank: redirects its output, sets its environment, runs the rank, and calls exit handlers."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import types

from ddptrain.protocol.commands import CommandReader
from ddptrain.protocol.exec_env import names_working_directory
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank import process_control
from ddptrain.rank.lifecycle import RankLifecycle
from ddptrain.rank.output import Emitter

_LASTING = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def read_spec(fd: int) -> RankSpec:
    """Return the rank spec in the open file `fd`."""
    with open(fd, encoding="utf-8", closefd=False) as file:
        return RankSpec.from_json(file.read())


def run_rank(spec: RankSpec, log_fd: int, events_fd: int, commands_fd: int, *, why_cold: str = "") -> int:
    """Run the workload in this process. Return the exit code. Must be called once per process.

    The driver's commands are read from `commands_fd`. `why_cold`: why this is a new process, which the user is told;
    "" if it is a fork of the warm rank server.
    """
    process_control.name_process(f"ddptrain-rank{spec.rank}", f"ddptrain rank {spec.rank} of {spec.run_id}")
    for fd in (1, 2):  # also for C libraries and child processes
        os.dup2(log_fd, fd, inheritable=True)
    faulthandler.enable(file=2)
    emitter = Emitter(events_fd, os.path.realpath(f"/proc/self/fd/{events_fd}"))
    if why_cold and spec.rank == 0:
        emitter.note(f"ranks start cold, some seconds slower: {why_cold}")
    _enter_environment(spec)
    if not why_cold:
        _forget_server()
    newest = next(reversed(sys.modules))
    rank = RankLifecycle(spec, emitter, CommandReader(commands_fd))
    try:
        code = rank.run()
        rank.tracked.bound_exit(code)
    finally:
        _end_program(spec, newest)
    return code


def _forget_server() -> None:
    """Give this fork its own random numbers and secrets; those of the server are equal in all ranks and runs.

    The generators of GPUs are created and seeded later, in each rank.
    """
    import numpy as np
    import torch

    random.seed()
    np.random.seed(None)
    torch.default_generator.seed()
    if (sympy_random := sys.modules.get("sympy.core.random")) is not None:
        sympy_random.rng.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # TMPDIR may be another


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
    time.tzset()


def _end_program(spec: RankSpec, newest: str) -> None:
    """Do what the interpreter does at exit, but call no C++ destructors, which can abort a finished rank.

    `newest` is the module that was imported last before the user's code.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # joins the user's threads, as Python does at exit
        atexit._run_exitfuncs()  # noqa: SLF001
    except BaseException:
        traceback.print_exc()
    _flush_files()  # before the garbage collector, which closes the buffer of a text file before the text is in it
    _release_objects(spec, newest)
    _flush_files()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the script may have set it to None
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _release_objects(spec: RankSpec, newest: str) -> None:
    """Release the objects of the user's modules. Some complete their files only then, as those of zip and Parquet."""
    names = _names_of_users_modules(spec, newest)
    for name in names:
        del sys.modules[name]
    gc.collect()
    # A signal handler may still refer to a module. Objects are released before what they may need: functions, modules.
    frames = [frame for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top)]  # noqa: SLF001
    running = {id(frame.f_globals) for frame in frames}  # of threads that do not end
    for each in gc.get_objects():
        if type(each) is dict and "__builtins__" in each and each.get("__name__") in names and id(each) not in running:
            for name in [name for name, value in each.items() if not (name[:2] == "__" or isinstance(value, _LASTING))]:
                each[name] = None
    gc.collect()


def _names_of_users_modules(spec: RankSpec, newest: str) -> set[str]:
    script = getattr(sys.modules.get("__main__"), "__file__", None) if spec.code.is_script else None
    folders = [*spec.code.sys_path, spec.code.workdir, *([os.path.dirname(script)] if script else [])]
    inside = tuple(path + os.sep for folder in folders for path in (folder, os.path.realpath(folder)))
    # Only modules that were imported since: to look into all would copy memory that the fork shares with the server.
    new = itertools.takewhile(lambda name: name != newest, reversed(list(sys.modules)))
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in new}
    names = {
        name
        for name, file in files.items()
        if file.startswith(inside) and "site-packages" not in file and name.partition(".")[0] != "ddptrain"
    }
    return names | ({"__main__", "__mp_main__"} & sys.modules.keys() if spec.code.is_script else set())


def _flush_files() -> None:
    """Write the buffers of open files, as the interpreter does at exit: the user's code may have left files open."""
    for each in gc.get_objects():
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(OSError, ValueError):
                each.flush()


def main() -> None:
    """Run a rank after a cold start.

    Arguments: the descriptors of the spec, the log, the events and the commands, the server's pid, the reason.
    """
    spec_fd, log_fd, events_fd, commands_fd, server = (int(word) for word in sys.argv[1:6])
    process_control.die_with_parent(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the worker ignores it, and a new process inherits that
    code = 70
    try:
        code = run_rank(read_spec(spec_fd), log_fd, events_fd, commands_fd, why_cold=sys.argv[6])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
