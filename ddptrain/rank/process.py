"""One rank: set up the process, import the user's code, bring the process group up, call the workload, report.

The failure event is written the moment an exception leaves the user's code, before the process group is brought
down or any other clean-up runs, so that the first failing rank can be told from those that merely lost it.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import faulthandler
import importlib
import io
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddptrain import events
from ddptrain.rank import faults, orders, procs
from ddptrain.rank.agreement import Calls, GangStore, Preempted
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.loading import load_function
from ddptrain.rank.orders import Orders
from ddptrain.rank.stacks import Stacks, tell_of_threads
from ddptrain.spec import RankSpec

if TYPE_CHECKING:
    import torch

    from ddptrain.rank.context import RankContext

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
    procs.name_process(f"ddptrain-rank{spec.rank}")
    _redirect_output(log_fd)
    emitter = Emitter(events_fd)
    if cold and spec.rank == 0:
        emitter.emit(events.Note(time.time_ns(), _COLD))
    _enter_environment(spec)
    try:
        code = _Rank(spec, emitter, Orders(orders_fd)).run()
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
    os.chdir(spec.workdir)
    for entry in reversed(spec.sys_path):
        if entry in sys.path:
            sys.path.remove(entry)
        sys.path.insert(0, entry)
    importlib.invalidate_caches()
    sys.argv = [spec.workload]
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
        self.calls = Calls(spec, GangStore(spec))
        self.context: RankContext | None = None

    def run(self) -> int:
        """Run all phases; return the exit code. A clean return of the user's function is a success, come what may."""
        try:
            self._take_orders()
            tell_of_threads(self.emitter)
            device = self._set_up_torch()
            self._emit_started(device)
            function = load_function(self.spec.workload)
            self._dispatch(function, device)
        except SystemExit as stop:
            if not self.failed and not isinstance(stop, Preempted):
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

    def _take_orders(self) -> None:
        """From now on SIGTERM is a notice that the host is about to go; only the order to stop makes it deadly."""

        def notice(*_: object) -> None:
            self.orders.post(orders.NOTICED)

        def preempt() -> None:
            if self.calls.saves:
                self.calls.tell_to_end()
            elif signal.getsignal(signal.SIGTERM) is notice:
                procs.die_of_sigterm()
            else:
                os.kill(os.getpid(), signal.SIGTERM)

        def stop() -> None:
            self._complete_saves()
            if signal.getsignal(signal.SIGTERM) is notice:  # else the user's own handler has a say
                procs.die_of_sigterm()

        signal.signal(signal.SIGTERM, notice)
        self.orders.on(orders.NOTICED, lambda: self.emitter.emit(events.Noticed(time.time_ns())))
        self.orders.on(orders.PREEMPT, preempt)
        self.orders.on(orders.STOP, stop)
        self.orders.on(orders.STACKS, Stacks(self.spec, self.emitter).tell)
        self.orders.listen()

    def _set_up_torch(self) -> torch.device:
        import numpy as np
        import torch
        from torch.distributed import distributed_c10d as c10d

        from ddptrain.rank import loaderworkers

        loaderworkers.protect()
        np.random.seed(None)  # forks share the server's state otherwise
        torch.set_num_threads(self.spec.cpu_threads)
        timeout = dt.timedelta(seconds=self.spec.dist_timeout_s)
        # dispatch_with_ddp has no timeout argument: these are init_process_group's defaults.
        vars(c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
        if self.spec.gpu is None:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"this rank was given GPU {self.spec.gpu}, but torch sees none: check the driver and torch's build"
            )
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)

    def _emit_started(self, device: torch.device) -> None:
        import torch

        self.emitter.emit(
            events.Started(
                time.time_ns(),
                pid=os.getpid(),
                host=socket.gethostname(),
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                environment=self.spec.environment,
                versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
            )
        )

    def _dispatch(self, function: Callable[..., Any], device: torch.device) -> None:
        """Let dask_pytorch_ddp bring the process group up, call the function, and bring it down."""
        from dask_pytorch_ddp.dispatch import dispatch_with_ddp

        self.phase = "rendezvous"
        dispatch_with_ddp(
            self._call,
            self.spec.master_addr,
            self.spec.master_port,
            self.spec.rank,
            self.spec.world_size,
            function,
            device,
            backend=self.spec.dist_backend,
        )

    def _call(self, function: Callable[..., Any], device: torch.device) -> None:
        from ddptrain.rank.context import RankContext

        self._meet()
        self.phase = "train"
        self.emitter.emit(events.Entered(time.time_ns()))
        self.context = RankContext(self.spec, self.emitter, device, self.calls)
        try:
            try:
                function(self.context, **self.spec.params)
            except SystemExit as stop:
                if faults.exit_code(stop) == 0:
                    self.context.close()
                raise
            self.context.close()
        except Preempted:
            raise
        except SystemExit as stop:
            self._exit_event(stop)
            self._complete_saves()
            raise
        except BaseException as error:
            self._failure_event(error)
            self._complete_saves()
            raise
        self._finish()

    def _complete_saves(self) -> None:
        """The failure has been told, or the gang is being stopped: a checkpoint that is being written is still kept."""
        if self.context is not None:
            with contextlib.suppress(Exception):
                self.context.close(self.spec.grace_s, failed=True)

    def _meet(self) -> None:
        """Wait for all ranks: one that fails or ends at once would look like a lost peer to those still connecting."""
        if self.spec.dist_backend == "gloo":  # NCCL connects later, at the first collective
            from torch import distributed

            distributed.barrier()

    def _finish(self) -> None:
        self.emitter.emit(events.Finished(time.time_ns()))
        self.finished = True

    def _exit_event(self, stop: SystemExit) -> None:
        if faults.exit_code(stop) == 0:
            self._finish()
            return
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)  # as the interpreter does
        self._fail(faults.bad_exit(stop, self.phase))

    def _failure_event(self, error: BaseException) -> None:
        print(faults.user_traceback(error), end="", file=sys.stderr)
        self._fail(faults.failure(error, self.phase))

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
    procs.die_with_parent()
    code = 70
    try:
        code = run_rank(read_spec(spec_fd), log_fd, events_fd, orders_fd, cold=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
