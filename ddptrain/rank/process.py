"""One rank: set up the process, import the user's code, bring the process group up, call the workload, report.

The failure event is written the moment an exception leaves the user's code, before the process group is brought
down or any other clean-up runs, so that the first failing rank can be told from those that merely lost it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime as dt
import faulthandler
import importlib
import io
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.protocol import error_file, events
from ddptrain.protocol.commands import Orders
from ddptrain.protocol.exec_env import names_working_directory
from ddptrain.protocol.rank_spec import ERROR_FILE, RankSpec
from ddptrain.rank import current, faults, script
from ddptrain.rank.checkpoint.coordination import EXIT_PREEMPTED, Calls, GangStore, Preempted
from ddptrain.rank.collective.calls import GangCalls
from ddptrain.rank.control import Obeying
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.entrypoint import as_json, bind
from ddptrain.rank.load_workload import load_function
from ddptrain.rank.server import process_control
from ddptrain.rank.short_traceback import folded
from ddptrain.rank.stacks import tell_of_threads
from ddptrain.rank.trackers import Tracked

if TYPE_CHECKING:
    import torch

    from ddptrain.rank.context import RankContext
    from ddptrain.tracking.protocol import State

_COLD = (
    "ranks start cold, some seconds slower: the environment sets variables that only a fresh program reads "
    "(MALLOC_*, LD_*, PYTHON*, ...), or importing torch started threads"
)


def read_spec(fd: int) -> RankSpec:
    """The order that the worker wrote into the file behind `fd`."""
    with open(fd, encoding="utf-8", closefd=False) as file:
        return RankSpec.from_json(file.read())


def run_rank(spec: RankSpec, log_fd: int, events_fd: int, orders_fd: int, *, cold: bool = False) -> int:
    """Be the rank: run the workload to its end and return the exit code. Called once, in a process of its own.

    Orders of the driver come through `orders_fd`. `cold` says that this is a fresh program, not a fork of the warm
    rank server; the person is told why.
    """
    process_control.name_process(f"ddptrain-rank{spec.rank}")
    _redirect_output(log_fd)
    emitter = Emitter(events_fd)
    if cold and spec.rank == 0:
        emitter.emit(events.Note(time.time_ns(), _COLD))
    _enter_environment(spec)
    rank = _Rank(spec, emitter, Orders(orders_fd))
    try:
        code = rank.run()
        rank.tracked.bound_exit(code)
    finally:
        _run_exit_handlers()
    return code


def _redirect_output(log_fd: int) -> None:
    """Send stdout and stderr, also those of C libraries and children, to the log, as they are written."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for fd in (1, 2):
        os.dup2(log_fd, fd, inheritable=True)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # for the life of the process
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    faulthandler.enable(file=2)


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """Nothing waits in a buffer where SIGKILL would lose it."""
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _enter_environment(spec: RankSpec) -> None:
    """Make this process look as if it had been started with the rank's environment, folder and path."""
    os.environ.clear()
    os.environ.update(spec.env)
    os.chdir(spec.code.workdir)
    # A script sees its own folder first, and no other; scripts.run sees to it.
    entries = [*(spec.code.sys_path if not spec.code.script else ())]
    if names_working_directory(spec.env) and spec.code.workdir not in entries:
        entries.append(spec.code.workdir)
    kept = [entry for entry in sys.path if entry not in entries]
    sys.path[:] = [*kept, *entries] if spec.code.built_in else [*entries, *kept]
    importlib.invalidate_caches()
    sys.argv = [spec.code.workload]
    random.seed()
    tz = getattr(time, "tzset", None)
    if tz is not None:
        tz()


class _Rank:
    """The rank's life in phases: setup, rendezvous, train."""

    def __init__(self, spec: RankSpec, emitter: Emitter, orders: Orders) -> None:
        self.spec = spec
        self.emitter = emitter
        self.orders = orders
        self.phase = "setup"
        self.finished = False
        self.failed = False
        self.preempted = False
        self.calls = Calls(spec, GangStore(spec))
        self.gang_calls = GangCalls(spec, emitter)
        self.tracked = Tracked(spec, emitter)
        self.context: RankContext | None = None

    def run(self) -> int:
        """Run all phases, and have the trackers finish; return the exit code.

        A clean return of the user's function is a success, come what may, unless `tracking.strict` says otherwise.
        """
        code = self._run_phases()
        error = self.tracked.finish(self._state())
        return code or int(bool(error))

    def _state(self) -> State:
        """How the rank has ended, in the words of trackers."""
        if self.finished:
            return "finished"
        return "preempted" if self.preempted else "failed" if self.failed else "crashed"

    def _run_phases(self) -> int:
        try:
            self._obey()
            tell_of_threads(self.emitter)
            device = self._set_up_torch()
            self._emit_started(device)
            current.provide(lambda: self._own_context(device))
            if self.spec.code.is_script:
                self._work(lambda: script.run(self.spec, self.tracked.begin))
            else:
                call = bind(load_function(self.spec.code.workload), self.spec.code.params)
                self._dispatch(call, device)
        except SystemExit as stop:
            if not (self.failed or self.finished or self.preempted):
                self._exit_event(stop)
            return faults.exit_code(stop)
        except BaseException as error:
            if self.finished:
                print(f"ddptrain: after the workload had returned: {error!r}", file=sys.stderr)
                return 0
            if not self.failed:
                self._failure_event(error.__context__ if self.phase == "rendezvous" and error.__context__ else error)
            return 1
        return 0

    def _obey(self) -> None:
        parts = (self.spec, self.emitter, self.orders, self.calls, self.gang_calls, self.tracked)
        Obeying(*parts, state=self._state, complete_saves=self._complete_saves).begin()

    def _set_up_torch(self) -> torch.device:
        import numpy as np
        import torch
        from torch.distributed import distributed_c10d as c10d

        from ddptrain.rank.data import workers

        workers.protect()
        np.random.seed(None)  # forks share the server's state otherwise
        torch.set_num_threads(self.spec.host.cpu_threads)
        timeout = dt.timedelta(seconds=self.spec.group.timeout_s)
        if self.spec.host.gpu is None:
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", self.spec.placement.local_rank if self.spec.code.is_script else 0)
        if self.spec.code.is_script:
            return device  # how long its collectives may take, and what touches the device first, is the script's
        # dispatch_with_ddp has no timeout argument: these are init_process_group's defaults.
        vars(c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
        if self.spec.host.gpu is None:
            return device
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"this rank was given GPU {self.spec.host.gpu}, but torch sees none: check the driver and torch's build"
            )
        torch.cuda.set_device(device)
        return device

    def _emit_started(self, device: torch.device) -> None:
        import torch

        self.emitter.emit(
            events.Started(
                time.time_ns(),
                pid=os.getpid(),
                host=socket.gethostname(),
                device=self._device_name(device),
                environment=self.spec.host.environment,
                versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
            )
        )

    def _device_name(self, device: torch.device) -> str:
        import torch

        if device.type != "cuda":
            return "cpu"
        # Asking for the name brings CUDA up, which is the script's to do: it may fork first.
        return str(self.spec.host.gpu) if self.spec.code.is_script else torch.cuda.get_device_name(device)

    def _dispatch(self, function: Callable[[RankContext], Any], device: torch.device) -> None:
        """Let dask_pytorch_ddp bring the process group up, call the function, and bring it down."""
        from dask_pytorch_ddp.dispatch import dispatch_with_ddp

        self.phase = "rendezvous"
        dispatch_with_ddp(
            self._call,
            self.spec.group.master_addr,
            self.spec.group.master_port,
            self.spec.rank,
            self.spec.placement.world_size,
            function,
            device,
            backend=self.spec.group.backend,
        )

    def _call(self, function: Callable[[RankContext], Any], device: torch.device) -> None:
        self._meet()
        context = self._own_context(device)
        self.tracked.begin()
        self._work(lambda: self._returned(function(context)))

    def _own_context(self, device: torch.device) -> RankContext:
        """The rank's only context, made when it is asked for."""
        from ddptrain.rank.context import RankContext

        if self.context is None:
            self.context = RankContext(self.spec, self.emitter, device, self.calls, self.tracked, self.gang_calls)
        return self.context

    def _work(self, work: Callable[[], None]) -> None:
        """Run the user's code, and tell how it ended before anything is cleared up."""
        self.phase = "train"
        self.emitter.emit(events.Entered(time.time_ns()))
        try:
            try:
                work()
            except SystemExit as stop:
                if faults.exit_code(stop) == 0:
                    self._close()
                raise
            self._close()
        except Preempted:
            self.preempted = True
            raise
        except SystemExit as stop:
            self._exit_event(stop)
            self._end_tracking()
            self._complete_saves()
            raise
        except BaseException as error:
            self._failure_event(error)
            self._end_tracking()
            self._complete_saves()
            raise
        self._finish()

    def _close(self) -> None:
        """Complete what is being saved by a workload that has returned; one that did so as it is to end is preempted.

        Raises: Preempted; OSError where a checkpoint could not be written.
        """
        if self.context is None:
            return
        self.context.close()
        if not self.calls.ends_early:
            return
        if self.calls.has_saved:
            self.emitter.emit(events.Preempted(time.time_ns(), step=0))
            raise Preempted
        text = (
            "the workload returned because the run is to end (ctx.preempted), and has saved no checkpoint with "
            "ctx.checkpoint: raise SystemExit(75) where it has saved its state itself"
        )
        self.emitter.emit(events.Note(time.time_ns(), text, "warning"))
        self.tracked.finish("preempted")
        process_control.die_of_sigterm()

    def _end_tracking(self) -> None:
        """Trackers of a rank that has failed finish at once: it is about to be stopped."""
        if self.failed:
            self.tracked.hurry(self.spec.supervision.grace_s)
            self.tracked.end(self._state())

    def _returned(self, value: Any) -> None:
        """Keep what rank 0's function has returned, where that is JSON."""
        if self.spec.rank != 0 or value is None or self.calls.ends_early:
            return
        try:
            event: events.Event = events.Returned(time.time_ns(), as_json(value))
        except Exception as error:  # whatever a value of the user's raises when it is looked at
            text = f"what the workload returned ({type(value).__name__}) is not kept: {error}"
            event = events.Note(time.time_ns(), faults.clipped(text, 1_000), "warning")
        self.emitter.emit(event)

    def _complete_saves(self) -> None:
        """The failure has been told, or the gang is being stopped: a checkpoint that is being written is still kept."""
        if self.context is not None:
            with contextlib.suppress(Exception):
                self.context.close(self.spec.supervision.grace_s, failed=True)

    def _meet(self) -> None:
        """Wait for all ranks: one that fails or ends at once would look like a lost peer to those still connecting."""
        if self.spec.group.backend == "gloo":  # NCCL connects later, at the first collective
            from torch import distributed

            distributed.barrier()

    def _finish(self) -> None:
        self.emitter.emit(events.Finished(time.time_ns(), self.gang_calls.counts))
        self.finished = True

    def _exit_event(self, stop: SystemExit) -> None:
        code = faults.exit_code(stop)
        if code == 0:
            self._finish()
            return
        if code == EXIT_PREEMPTED and (self.spec.code.is_script or self.calls.notified):
            self.preempted = True
            self.emitter.emit(events.Preempted(time.time_ns(), step=0))
            return
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)  # as the interpreter does
        failure = faults.bad_exit(stop, self.phase)
        recorded = self._recorded()
        self._fail(dataclasses.replace(recorded, exit_code=code) if recorded is not None else failure)

    def _failure_event(self, error: BaseException) -> None:
        faults.name_search_path(error)
        trace = faults.user_traceback(error)
        print(trace if self.spec.code.full_traceback else folded(trace), end="", file=sys.stderr)
        failure, recorded = faults.failure(error, self.phase), self._recorded()
        if recorded is not None and recorded.message.partition("\n")[0] not in failure.message:
            failure = dataclasses.replace(recorded, lost_peer=failure.lost_peer, timed_out=failure.timed_out)
        self._fail(failure)

    def _recorded(self) -> events.Failure | None:
        """What a script has written as its error, as torch elastic's record() does."""
        return error_file.take(Path(self.spec.host.staging) / ERROR_FILE) if self.spec.code.is_script else None

    def _fail(self, failure: events.Failure) -> None:
        self.failed = True
        self.emitter.emit(failure)


def _run_exit_handlers() -> None:
    """What the interpreter does at its end, but for C++ destructors, which have aborted finished ranks."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # joins the user's threads, as Python does
        atexit._run_exitfuncs()  # noqa: SLF001
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def main() -> None:
    """A rank started cold: the spec's, the log's, the events' and the orders' descriptors are the arguments."""
    spec_fd, log_fd, events_fd, orders_fd = (int(word) for word in sys.argv[1:5])
    process_control.die_with_parent()
    code = 70
    try:
        code = run_rank(read_spec(spec_fd), log_fd, events_fd, orders_fd, cold=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
