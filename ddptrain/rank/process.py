"""One rank: set up the process, import the user's code, bring the process group up, call the workload, report.

The failure event is written the moment an exception leaves the user's code, before the process group is brought
down or any other clean-up runs, so that the first failing rank can be told from those that merely lost it.
"""

from __future__ import annotations

import atexit
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
from typing import TYPE_CHECKING, Any

from ddptrain import events
from ddptrain.rank import procs
from ddptrain.rank.emitter import Emitter
from ddptrain.spec import RankSpec

if TYPE_CHECKING:
    import torch

# What a rank that merely lost its peer says, in gloo's, NCCL's, the store's and the socket layer's words.
_LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process has exited",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "sendbytes failed",
    "ncclremoteerror",
    "application timeout caused pair closure",
    "connectfullmesh failed",
    "timed out waiting for clients",
    "wait timeout",
)


_COLD = (
    "ranks start cold, some seconds slower: the environment sets variables that only a fresh program reads "
    "(MALLOC_*, LD_*, PYTHON*, ...), or importing torch started threads"
)


def read_spec(fd: int) -> RankSpec:
    """The order that the worker wrote into the file behind `fd`."""
    with open(fd, encoding="utf-8", closefd=False) as file:
        return RankSpec.from_json(file.read())


def run_rank(spec: RankSpec, log_fd: int, events_fd: int, *, cold: bool = False) -> int:
    """Be the rank: run the workload to its end and return the exit code. Called once, in a process of its own.

    `cold` says that this is a fresh program, not a fork of the warm rank server; the person is told why.
    """
    procs.name_process(f"ddptrain-rank{spec.rank}")
    _redirect_output(log_fd)
    emitter = Emitter(events_fd)
    if cold and spec.rank == 0:
        emitter.emit(events.Note(time.time_ns(), _COLD))
    _enter_environment(spec)
    try:
        code = _Rank(spec, emitter).run()
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

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self.spec = spec
        self.emitter = emitter
        self.phase = "setup"
        self.finished = False
        self.failed = False

    def run(self) -> int:
        """Run all phases; return the exit code. A clean return of the user's function is a success, come what may."""
        try:
            device = self._set_up_torch()
            self._emit_started(device)
            function = load_function(self.spec.workload)
            self._dispatch(function, device)
        except SystemExit as stop:
            if not self.failed:
                self._exit_event(stop)
            return _exit_code(stop)
        except BaseException as error:
            if self.finished:
                print(f"ddptrain: after the workload had returned: {error!r}", file=sys.stderr)
                return 0
            if not self.failed:
                self._failure_event(error.__context__ if self.phase == "rendezvous" and error.__context__ else error)
            return 1
        return 0

    def _set_up_torch(self) -> torch.device:
        import numpy as np
        import torch
        from torch.distributed import distributed_c10d as c10d

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
        try:
            function(RankContext(self.spec, self.emitter, device), **self.spec.params)
        except SystemExit as stop:
            self._exit_event(stop)
            raise
        except BaseException as error:
            self._failure_event(error)
            raise
        self._finish()

    def _meet(self) -> None:
        """Wait for all ranks: one that fails or ends at once would look like a lost peer to those still connecting."""
        if self.spec.dist_backend == "gloo":  # NCCL connects later, at the first collective
            from torch import distributed

            distributed.barrier()

    def _finish(self) -> None:
        self.emitter.emit(events.Finished(time.time_ns()))
        self.finished = True

    def _exit_event(self, stop: SystemExit) -> None:
        code = _exit_code(stop)
        if code == 0:
            self._finish()
            return
        message = f"sys.exit({stop.code!r})"
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)  # as the interpreter does
        self._emit_failure("SystemExit", message, _user_traceback(stop), exit_code=code)

    def _failure_event(self, error: BaseException) -> None:
        text = _user_traceback(error)
        print(text, end="", file=sys.stderr)
        self._emit_failure(type(error).__qualname__, str(error), text, lost_peer=_lost_peer(error))

    def _emit_failure(
        self, kind: str, message: str, text: str, *, exit_code: int | None = None, lost_peer: bool = False
    ) -> None:
        self.failed = True
        self.emitter.emit(
            events.Failure(
                time.time_ns(),
                type=kind,
                message=_clipped(message, 4_000),
                traceback=_clipped(text, 100_000),
                phase=self.phase,
                exit_code=exit_code,
                lost_peer=lost_peer,
            )
        )


def load_function(target: str) -> Callable[..., Any]:
    """The function behind "package.module:function", imported now.

    Raises:
        ImportError: the module can't be found; Python and sys.path are told.
        AttributeError: the module has no such function.
    """
    module_name, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        root = module_name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        raise ModuleNotFoundError(
            f"workload {target!r}: no module {error.name!r} for {sys.executable}, sys.path {sys.path}", name=error.name
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            public = sorted(attr for attr, value in vars(found).items() if callable(value) and not attr.startswith("_"))
            raise AttributeError(
                f"workload {target!r}: {found!r} has no {part!r}; it has {', '.join(public) or 'nothing'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"workload {target!r} is {found!r}, not a function")
    return found  # type: ignore[no-any-return]


def _exit_code(stop: SystemExit) -> int:
    """What the interpreter would exit with: an integer's low byte, 0 for None, 1 for anything else."""
    if stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def _user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on: the frames of the launcher say nothing about the fault."""
    lines = traceback.TracebackException.from_exception(error)
    ours = {__file__, _dispatch_file()}
    kept = [frame for frame in lines.stack if frame.filename not in ours]
    lines.stack[:] = kept or list(lines.stack)
    return "".join(lines.format())


def _dispatch_file() -> str:
    module = sys.modules.get("dask_pytorch_ddp.dispatch")
    return str(getattr(module, "__file__", ""))


def _lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank has gone."""
    if not isinstance(error, RuntimeError | ConnectionError | OSError):  # torch's DistError tree is below RuntimeError
        return False
    text = str(error).lower()
    return any(words in text for words in _LOST_PEER_WORDS)


def _clipped(text: str, limit: int) -> str:
    return (
        text
        if len(text) <= limit
        else f"{text[: limit // 2]}\n... [{len(text) - limit} characters] ...\n{text[-limit // 2 :]}"
    )


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
    """A rank started cold: the spec's, the log's and the events' descriptors are the arguments."""
    spec_fd, log_fd, events_fd = (int(word) for word in sys.argv[1:4])
    procs.die_with_parent()
    code = 70
    try:
        code = run_rank(read_spec(spec_fd), log_fd, events_fd, cold=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
