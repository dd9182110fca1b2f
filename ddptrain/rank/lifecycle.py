"""The life of a rank: its process is set up, it joins the process group, calls the workload, and reports how it ended.

`run_rank` runs in a fork of the rank server; `main` in a new process (a cold start).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime as dt
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.errors import one_line
from ddptrain.protocol import deadlines, events
from ddptrain.protocol.commands import FORWARDED, OF_SIGNALS, Command, CommandReader
from ddptrain.protocol.exec_env import names_working_directory
from ddptrain.protocol.rank_errors import read_error_file
from ddptrain.protocol.rank_spec import ERROR_FILE, RankSpec
from ddptrain.rank import failure as failures
from ddptrain.rank import process_control
from ddptrain.rank.agreement import EXIT_PREEMPTED, Agreement, PreemptedExit
from ddptrain.rank.entrypoint import as_json, bind, forget_hidden_modules, load_function, run_script
from ddptrain.rank.failure import StackWriter, clipped, report_thread_failures, shortened, user_traceback
from ddptrain.rank.output import Emitter
from ddptrain.rank.profile import note_unused
from ddptrain.rank.trackers import RankTrackers

if TYPE_CHECKING:
    import torch

    from ddptrain.rank.context import RankContext
    from ddptrain.rank.debugger import Debugger
    from ddptrain.rank.steps import WaitingTime
    from ddptrain.tracking.protocol import State

_EXIT_S = 1.0  # time for a finished rank to exit by itself
_NEEDED_BY_FUNCTIONS = frozenset({"dask_pytorch_ddp", "pydantic", "pydantic_core", "safetensors"})
_INSTALLED = re.compile("/(?:site|dist)-packages/")
_NOT_THE_USERS = sys.stdlib_module_names | {"ddptrain"}  # also if the script is in the home directory, with its Python
_LASTING = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


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
    rank = RankLifecycle(spec, emitter, CommandReader(commands_fd))
    try:
        code = rank.run()
        rank.tracked.bound_exit(code)
    finally:
        _end_program(spec)
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


class RankLifecycle:
    """Runs a rank. The methods are in the order in which they are called; commands arrive in a thread, at any time."""

    def __init__(self, spec: RankSpec, emitter: Emitter, commands: CommandReader) -> None:
        self.spec = spec
        self.emitter = emitter
        self.commands = commands
        self.phase = "setup"  # then "rendezvous" and "train", for the failure event
        self.state: State = "crashed"  # how the rank has ended; "crashed" while it has not ended
        self.agreement = Agreement(spec)
        self.tracked = RankTrackers(spec, emitter)
        self.context: RankContext | None = None
        self.waiting: WaitingTime | None = None
        self.debugger: Debugger | None = None
        self._pid = os.getpid()

    def run(self) -> int:
        """Run all phases and finish the trackers. Return the exit code.

        If the user's function has returned, later errors do not change the success.
        """
        code = self._run_phases()
        if self.waiting is not None:
            self.waiting.flush()
        self.tracked.finish(self.state)
        return code

    def _run_phases(self) -> int:
        try:
            self._handle_commands()
            report_thread_failures(self.emitter)
            device = self._set_up_torch()
            self._prepare_debugger()
            self._provide_context(device)
            if self.spec.code.is_script:
                self._run_user_code(lambda: run_script(self.spec, self.tracked.begin))
            else:
                forget_hidden_modules(self.spec.code.sys_path, _NEEDED_BY_FUNCTIONS)
                call = bind(load_function(self.spec.code.workload), self.spec.code.params)
                self._join_process_group(call)
        except SystemExit as stop:
            if self.state == "crashed":
                self._report_exit(stop)
            return failures.exit_code(stop)
        except BaseException as error:
            if self.state == "finished":
                _print_to_log(f"ddptrain: after the workload had returned: {error!r}\n")
                return 0
            if self.state == "crashed":
                self._report_failure(error.__context__ if self.phase == "rendezvous" and error.__context__ else error)
            return 1
        return 0

    # --- set-up ---

    def _set_up_torch(self) -> torch.device:
        """Set the device and the time limits, measure steps and waits, and report that the rank has started."""
        import torch
        from torch.distributed import distributed_c10d as c10d

        from ddptrain.rank import loader, steps

        loader.protect(lambda risk: self.emitter.note(risk, "warning") if self.spec.rank == 0 else None)
        torch.set_num_threads(self.spec.host.cpu_threads)
        gpu, is_script = self.spec.host.gpu, self.spec.code.is_script
        device, name = torch.device("cpu"), "cpu"
        if gpu is not None:
            device, name = torch.device("cuda", self.spec.placement.local_rank if is_script else 0), str(gpu)
        if not is_script:  # a script itself sets the time limit, and initializes the device, because it may fork before
            # dispatch_with_ddp has no time-out argument, so the defaults of init_process_group are changed.
            timeout = dt.timedelta(seconds=self.spec.group.timeout_s)
            vars(c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
            if gpu is not None:
                if not torch.cuda.is_available():
                    raise RuntimeError(
                        f"this rank was given GPU {gpu}, but torch sees none: check the driver and torch's build"
                    )
                torch.cuda.set_device(device)
                name = torch.cuda.get_device_name(device)
        if self.spec.rank == 0:
            self.waiting = steps.WaitingTime(self.emitter)
            steps.measure_data(self.waiting)
            steps.report_first_step(self.emitter)
        self.emitter.emit(
            events.Started(
                time.time_ns(),
                pid=os.getpid(),
                host=socket.gethostname(),
                device=name,
                environment=self.spec.host.environment,
                versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
            )
        )
        return device

    def _prepare_debugger(self) -> None:
        """Let breakpoint() open the debugger of --debug, or say that there is none."""
        if self.spec.debug is not None:
            from ddptrain.rank.debugger import prepare

            self.debugger = prepare(self.spec, self.spec.debug, self.emitter)
        elif not os.environ.get("PYTHONBREAKPOINT"):
            sys.breakpointhook = failures.refuse_breakpoint

    def _provide_context(self, device: torch.device) -> None:
        """Make ddptrain.context() return the rank's context, which is created at the first call."""
        from ddptrain.rank import context

        def make() -> RankContext:
            if self.context is None:
                self.context = context.RankContext(self.spec, self.emitter, device, self.agreement, self.tracked)
            return self.context

        context.provide(make)

    # --- the workload ---

    def _join_process_group(self, function: Callable[[RankContext], Any]) -> None:
        """Let dask_pytorch_ddp initialize the process group, call the function, and destroy the group."""
        from dask_pytorch_ddp.dispatch import dispatch_with_ddp

        self.phase = "rendezvous"
        group, placement = self.spec.group, self.spec.placement
        place = group.master_addr, group.master_port, self.spec.rank, placement.world_size
        dispatch_with_ddp(self._call, *place, function, backend=group.backend)

    def _call(self, function: Callable[[RankContext], Any]) -> None:
        from torch import distributed

        from ddptrain.rank.context import context as get_context
        from ddptrain.rank.steps import warn_without_exchange

        if self.spec.group.backend == "gloo":  # NCCL connects later, in the first collective operation
            # Wait until all are connected; otherwise a rank that fails at once looks like a lost peer to other ranks.
            distributed.barrier()
        context = get_context()
        if self.spec.rank == 0 and self.spec.placement.world_size > 1:
            warn_without_exchange(self.emitter)
        self.tracked.begin()
        self._run_user_code(lambda: self._report_result(function(context)))

    def _run_user_code(self, code: Callable[[], None]) -> None:
        """Run the user's code, and report how it ended before any cleanup."""
        self.phase = "train"
        self.emitter.emit(events.Entered(time.time_ns()))
        try:
            try:
                if self.debugger is not None:
                    self.debugger.begin()
                code()
            except BaseException as error:
                self._end_forked_child(error)
                if isinstance(error, SystemExit) and failures.exit_code(error) == 0:
                    self._close()
                raise
            self._end_forked_child(None)
            self._close()
        except PreemptedExit:
            self.state = "preempted"
            raise
        except BaseException as error:
            if isinstance(error, SystemExit):
                self._report_exit(error)
            else:
                self._report_failure(error)
            if self.state == "failed":  # the rank is about to be stopped, so the trackers finish now
                self.tracked.hurry(self.spec.config.failure.grace_s)
                self.tracked.end(self.state)
            self._complete_saves()
            raise
        self._report_finished()

    def _report_result(self, value: Any) -> None:
        if self.spec.rank != 0 or value is None or self.agreement.ends_early:
            return
        try:
            self.emitter.emit(events.Returned(time.time_ns(), as_json(value)))
        except Exception as error:  # the user's value may raise anything when it is converted
            text = f"the workload's return value ({type(value).__name__}) is not stored: {error}"
            self.emitter.note(clipped(text, 1_000), "warning")

    # --- the end ---

    def _end_forked_child(self, error: BaseException | None) -> None:
        """End this process if the user's code has forked it: the process group and all else are its parent's."""
        if os.getpid() == self._pid:
            return
        if isinstance(error, SystemExit):
            os._exit(failures.exit_code(error))
        if error is not None:
            _print_to_log(user_traceback(error))
        os._exit(int(error is not None))

    def _close(self) -> None:
        """Complete the checkpoint that is being written, after the workload has returned.

        Raises:
            PreemptedExit: the workload returned because the run was asked to end.
            OSError: a checkpoint could not be written.
        """
        is_whole = not (self.agreement.notified or self.agreement.ends_early)
        if self.spec.rank == 0 and is_whole and (problem := self.agreement.no_early_stop()):
            self.emitter.note(problem, "warning")
        if self.context is None:
            note_unused(self.spec, self.emitter)
            return
        self.context.close()
        if not self.agreement.ends_early:
            return
        if self.agreement.has_saved:
            self.emitter.emit(events.Preempted(time.time_ns(), step=0))
            raise PreemptedExit
        text = (
            "the workload returned because the run was asked to end (ctx.preempted), but has saved no checkpoint with "
            "ctx.checkpoint; if it has saved its state itself, raise SystemExit(75)"
        )
        self.emitter.note(text, "warning")
        self.tracked.finish("preempted")
        process_control.die_of_sigterm()

    def _complete_saves(self) -> None:
        """Complete the checkpoint that is being written, after a failure or while the worker group is being stopped."""
        if self.context is not None:
            with contextlib.suppress(Exception):  # the failure has been reported; this must not replace it
                self.context.close(self.spec.config.failure.grace_s, failed=True)

    def _report_finished(self) -> None:
        self.emitter.emit(events.Finished(time.time_ns()))
        self.state = "finished"

    def _report_exit(self, stop: SystemExit) -> None:
        code = failures.exit_code(stop)
        if code == 0:
            self._report_finished()
            return
        if code == EXIT_PREEMPTED and (self.spec.code.is_script or self.agreement.notified):
            self.state = "preempted"
            self.emitter.emit(events.Preempted(time.time_ns(), step=0))
            return
        if not isinstance(stop.code, int):
            _print_to_log(f"{stop.code}\n")  # as Python does
        self._fail(dataclasses.replace(self._read_error_file() or failures.bad_exit(stop, self.phase), exit_code=code))

    def _report_failure(self, error: BaseException) -> None:
        if self.debugger is not None and self.debugger.has_quit:
            self.state = "failed"  # the driver ends the run
            return
        failures.add_search_path(error)
        trace = user_traceback(error)
        hook = failures.users_hook()
        if hook is None:
            self._print_traceback(trace)
        if self.debugger is not None:
            self.debugger.post_mortem(error)
        failure, recorded = failures.failure(error, self.phase), self._read_error_file()
        if recorded is not None and one_line(recorded.message) not in failure.message:
            failure = dataclasses.replace(recorded, lost_peer=failure.lost_peer, timed_out=failure.timed_out)
        self._fail(failure)
        if hook is not None:  # called after the report, because it may take long
            try:
                hook(type(error), error, failures.users_frames(error.__traceback__))
            except BaseException as failed:  # any user's code
                _print_to_log(f"Error in sys.excepthook:\n{user_traceback(failed)}\nOriginal exception was:\n")
                self._print_traceback(trace)

    def _read_error_file(self) -> events.Failure | None:
        """Return the error that a script has written to its error file, as torch elastic's record() does."""
        path = Path(self.spec.host.staging) / ERROR_FILE
        return read_error_file(path) if self.spec.code.is_script else None

    def _print_traceback(self, trace: str) -> None:
        _print_to_log(trace if self.spec.code.full_traceback else shortened(trace))

    def _fail(self, failure: events.Failure) -> None:
        self.state = "failed"
        self.emitter.emit(failure)

    # --- commands, in a thread of their own ---

    def _handle_commands(self) -> None:
        """Start to handle commands. Must be called in the main thread."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.register_at_fork(after_in_child=self._on_fork)
        on = self.commands.on
        on(Command.NOTICED, lambda: self.emitter.emit(events.Noticed(time.time_ns())))
        for signum, command in {signal.SIGTERM: Command.PREEMPT, **OF_SIGNALS}.items():
            on(command, partial(self._preempt, signum))
        for signum, command in FORWARDED.items():
            on(command, partial(self._on_user_signal, signum))
        on(Command.STOP, self._stop)
        on(Command.INPUT, lambda text: self.debugger.take(text) if self.debugger is not None else None)
        on(Command.BREAK, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
        on(Command.STACKS, StackWriter(self.spec).write)
        self.commands.listen()

    def _on_sigterm(self, *_: object) -> None:
        try:
            self.commands.post(Command.NOTICED)
        except OSError:  # the user's code has closed all descriptors
            process_control.die_of_sigterm()

    def _owns_sigterm(self) -> bool:
        """Return whether our handler of SIGTERM is active, and not one that the user's code has set."""
        return signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _on_fork(self) -> None:
        if self._owns_sigterm():  # a forked child must end on SIGTERM, and not notify the driver for the rank
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_user_signal(self, signum: int) -> None:
        if signal.getsignal(signum) != signal.SIG_DFL:
            os.kill(os.getpid(), signum)
        elif self.spec.rank == 0:
            text = f"{signal.Signals(signum).name} has no effect: the code has set no handler for it"
            self.emitter.note(text, "warning")

    def _preempt(self, signum: int) -> None:
        """End after the next save. A workload that does not save here gets `signum`, with its child processes."""
        self.agreement.notified = True
        if self.debugger is not None:
            self.debugger.ends = True
        self.tracked.hurry(deadlines.preempt_s(self.spec))
        if self.state != "crashed":
            return  # the rank is already ending
        if self.agreement.saves:
            self.agreement.end()
        elif signum != signal.SIGTERM:
            if signal.getsignal(signum) == signal.SIG_DFL:
                self.tracked.finish("preempted")
            os.killpg(os.getpgrp(), signum)
        elif self._owns_sigterm():
            self.tracked.finish("preempted")
            process_control.die_of_sigterm()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _stop(self) -> None:
        """End, because the worker group is being stopped; a handler of SIGTERM of the user's code ends it itself."""
        # An exception that the user's code is still handling may be the reason why other ranks have failed.
        if self.state == "crashed" and (failure := failures.handled(self.phase)) is not None:
            _print_to_log(f"ddptrain: the rank was asked to stop while it handled an exception:\n{failure.traceback}")
            self.emitter.emit(failure)
        self.tracked.hurry(self.spec.config.failure.grace_s)
        is_own = self._owns_sigterm()
        if is_own:
            self.tracked.end(self.state)
        self._complete_saves()
        if not is_own:
            return
        self.tracked.finish(self.state)
        if self.tracked.manager is not None and self.state != "crashed":
            time.sleep(_EXIT_S)  # the main thread has also finished, and is about to exit with its own code
        process_control.die_of_sigterm()


def _print_to_log(text: str) -> None:
    with contextlib.suppress(Exception):  # the user's code may have closed or replaced the stream
        sys.stderr.write(text)  # not print, which scripts replace so that only rank 0 prints
        sys.stderr.flush()


# --- the end of the process ---


def _end_program(spec: RankSpec) -> None:
    """Do what the interpreter does at exit, but call no C++ destructors, which can abort a finished rank."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # joins the user's threads, as Python does at exit
        atexit._run_exitfuncs()  # noqa: SLF001
    except BaseException:
        traceback.print_exc()
    _flush_files()  # before the garbage collector, which closes the buffer of a text file before the text is in it
    others = [frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]  # noqa: SLF001
    running = {id(frame.f_globals) for top in others for frame, _ in traceback.walk_stack(top)}
    if spec.code.is_script:
        # Release the objects of the script and its modules: some complete their files only then, as those of zip.
        # Functions and modules stay, which a finalizer may need; and what a daemon thread still needs.
        for values in map(vars, _modules_of_the_user(spec)):
            names = [each for each, value in values.items() if each[:2] != "__" and not isinstance(value, _LASTING)]
            values.update(dict.fromkeys(names) if id(values) not in running else {})
        gc.collect()
        _flush_files()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the script may have set it to None
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _modules_of_the_user(spec: RankSpec) -> list[types.ModuleType]:
    """Return the script, and the modules below its folder and the working directory that are not installed there."""
    main = sys.modules["__main__"]
    places = {os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "")), spec.code.workdir}
    folders = tuple(os.path.join(place, "") for place in places)
    found = [main]
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        is_own = name.partition(".")[0] not in _NOT_THE_USERS and not _INSTALLED.search(file)
        if file.startswith(folders) and is_own and module is not main:
            found.append(module)
    return found


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
        with open(spec_fd, encoding="utf-8") as file:
            spec = RankSpec.from_json(file.read())
        code = run_rank(spec, log_fd, events_fd, commands_fd, why_cold=sys.argv[6])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
