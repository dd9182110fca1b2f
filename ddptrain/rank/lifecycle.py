"""Runs a rank: sets up torch, joins the process group, calls the workload, obeys commands, and reports how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.errors import one_line
from ddptrain.file_ops import open_append
from ddptrain.protocol import deadlines, error_file, events
from ddptrain.protocol.commands import OF_SIGNALS, Command, CommandReader
from ddptrain.protocol.rank_spec import ERROR_FILE, STACKS_DUMP, STACKS_END, STACKS_SIGNAL, RankSpec
from ddptrain.rank import current_context, process_control, script
from ddptrain.rank import failure as failures
from ddptrain.rank.agreement import EXIT_PREEMPTED, Agreement, PreemptedExit
from ddptrain.rank.entrypoint import as_json, bind, load_function
from ddptrain.rank.failure import (
    clipped,
    handled_error,
    message_of,
    shortened,
    user_traceback,
    users_frames,
    users_hook,
)
from ddptrain.rank.output import Emitter
from ddptrain.rank.profile import note_unused
from ddptrain.rank.trackers import RankTrackers

if TYPE_CHECKING:
    import torch

    from ddptrain.rank.context import RankContext
    from ddptrain.rank.steps import WaitingTime
    from ddptrain.tracking.protocol import State


_EXIT_S = 1.0  # time for a finished rank to exit by itself


@dataclass(frozen=True, eq=False)
class CommandHandler:
    """Executes a rank's commands in a thread.

    state: returns how the rank has ended, or "crashed" while it runs. report_handled: reports the exception that the
    user's code is handling.
    """

    spec: RankSpec
    emitter: Emitter
    commands: CommandReader
    agreement: Agreement
    tracked: RankTrackers
    state: Callable[[], State]
    complete_saves: Callable[[], None]
    report_handled: Callable[[], None]

    def start(self) -> None:
        """Start to handle commands. Must be called in the main thread."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.register_at_fork(after_in_child=self._on_fork)
        self.commands.on(Command.NOTICED, lambda: self.emitter.emit(events.Noticed(time.time_ns())))
        self.commands.on(Command.PREEMPT, self._preempt)
        for signum, command in OF_SIGNALS.items():
            self.commands.on(command, partial(self._preempt, signum))
        self.commands.on(Command.USER_1, self._on_user_signal)
        self.commands.on(Command.STOP, self._stop)
        self.commands.on(Command.STACKS, StackWriter(self.spec).write)
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

    def _preempt(self, signum: int = signal.SIGTERM) -> None:
        """End after the next save. A workload that does not save here gets `signum`, with its child processes."""
        self.agreement.notified = True
        self.tracked.hurry(deadlines.preempt_s(self.spec))
        if self.state() != "crashed":
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

    def _on_user_signal(self) -> None:
        if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGUSR1)
        elif self.spec.rank == 0:
            text = "SIGUSR1 has no effect: the code has set no handler for it"
            self.emitter.emit(events.Note(time.time_ns(), text, "warning"))

    def _stop(self) -> None:
        self.report_handled()
        self.tracked.hurry(self.spec.supervision.grace_s)
        is_own = self._owns_sigterm()
        if is_own:
            self.tracked.end(self.state())
        self.complete_saves()
        if not is_own:
            return
        self.tracked.finish(self.state())
        if self.tracked.manager is not None and self.state() != "crashed":
            time.sleep(_EXIT_S)  # the main thread has also finished, and is about to exit with its own code
        process_control.die_of_sigterm()


_NEEDED_BY_FUNCTIONS = frozenset({"dask_pytorch_ddp", "pydantic", "pydantic_core", "safetensors"})


class RankLifecycle:
    """Runs a rank through its phases: setup, rendezvous, train."""

    def __init__(self, spec: RankSpec, emitter: Emitter, commands: CommandReader) -> None:
        self.spec = spec
        self.emitter = emitter
        self.commands = commands
        self._pid = os.getpid()
        self.phase = "setup"
        self.finished = False
        self.failed = False
        self.preempted = False
        self.agreement = Agreement(spec)
        self.tracked = RankTrackers(spec, emitter)
        self.context: RankContext | None = None
        self.waiting: WaitingTime | None = None

    def run(self) -> int:
        """Run all phases and finish the trackers. Return the exit code.

        If the user's function has returned, later errors do not change the success, unless `tracking.strict` is set.
        """
        code = self._run_phases()
        if self.waiting is not None:
            self.waiting.flush()
        error = self.tracked.finish(self._state())
        return code or int(bool(error))

    def _state(self) -> State:
        """Return how the rank has ended, as a state for trackers; "crashed" while it has not ended."""
        if self.finished:
            return "finished"
        return "preempted" if self.preempted else "failed" if self.failed else "crashed"

    def _run_phases(self) -> int:
        try:
            self._handle_commands()
            report_thread_failures(self.emitter)
            device = self._set_up_torch()
            self._measure_steps()
            self._emit_started(device)
            current_context.provide(lambda: self._get_context(device))
            if self.spec.code.is_script:
                self._run_user_code(lambda: script.run(self.spec, self.tracked.begin))
            else:
                script.forget_hidden_modules(self.spec.code.sys_path, _NEEDED_BY_FUNCTIONS)
                call = bind(load_function(self.spec.code.workload), self.spec.code.params)
                self._dispatch(call, device)
        except SystemExit as stop:
            if not (self.failed or self.finished or self.preempted):
                self._report_exit(stop)
            return failures.exit_code(stop)
        except BaseException as error:
            if self.finished:
                _print_to_log(f"ddptrain: after the workload had returned: {error!r}\n")
                return 0
            if not self.failed:
                self._report_failure(error.__context__ if self.phase == "rendezvous" and error.__context__ else error)
            return 1
        return 0

    def _handle_commands(self) -> None:
        parts = (self.spec, self.emitter, self.commands, self.agreement, self.tracked)
        CommandHandler(*parts, self._state, self._complete_saves, self._report_handled).start()

    def _set_up_torch(self) -> torch.device:
        import torch
        from torch.distributed import distributed_c10d as c10d

        from ddptrain.rank import loader

        loader.protect()
        torch.set_num_threads(self.spec.host.cpu_threads)
        timeout = dt.timedelta(seconds=self.spec.group.timeout_s)
        if self.spec.host.gpu is None:
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", self.spec.placement.local_rank if self.spec.code.is_script else 0)
        if self.spec.code.is_script:
            return device  # the script itself sets the time-out of collectives and initializes the device
        # dispatch_with_ddp has no time-out argument, so the defaults of init_process_group are changed.
        vars(c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                gpu = self.spec.host.gpu
                raise RuntimeError(
                    f"this rank was given GPU {gpu}, but torch sees none: check the driver and torch's build"
                )
            torch.cuda.set_device(device)
        return device

    def _measure_steps(self) -> None:
        """Measure the steps: rank 0 sums up its waits; all ranks report steps of DDP, which shows a slow rank."""
        from ddptrain.rank.steps import WaitingTime, measure_data, report_steps

        if self.spec.rank == 0:
            self.waiting = WaitingTime(self.emitter)
            measure_data(self.waiting)
        if (world_size := self.spec.placement.world_size) > 1:
            report_steps(self.emitter, world_size, self.waiting.first_step if self.waiting is not None else None)

    def _emit_started(self, device: torch.device) -> None:
        import torch

        name = "cpu"
        if device.type == "cuda":
            # Reading the name initializes CUDA. A script must do that itself, because it may fork before.
            name = str(self.spec.host.gpu) if self.spec.code.is_script else torch.cuda.get_device_name(device)
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

    def _dispatch(self, function: Callable[[RankContext], Any], device: torch.device) -> None:
        """Let dask_pytorch_ddp initialize the process group, call the function, and destroy the group."""
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
        self._wait_for_all_ranks()
        context = self._get_context(device)
        if self.spec.rank == 0 and self.spec.placement.world_size > 1:
            from ddptrain.rank.steps import warn_without_exchange

            warn_without_exchange(self.emitter)
        self.tracked.begin()
        self._run_user_code(lambda: self._report_result(function(context)))

    def _get_context(self, device: torch.device) -> RankContext:
        """Return the rank's context, which is created at the first call."""
        from ddptrain.rank.context import RankContext

        if self.context is None:
            self.context = RankContext(self.spec, self.emitter, device, self.agreement, self.tracked)
        return self.context

    def _run_user_code(self, code: Callable[[], None]) -> None:
        """Run the user's code, and report how it ended before any cleanup."""
        self.phase = "train"
        self.emitter.emit(events.Entered(time.time_ns()))
        try:
            try:
                code()
            except BaseException as error:
                self._end_forked_child(error)
                if isinstance(error, SystemExit) and failures.exit_code(error) == 0:
                    self._close()
                raise
            self._end_forked_child(None)
            self._close()
        except PreemptedExit:
            self.preempted = True
            raise
        except SystemExit as stop:
            self._report_exit(stop)
            self._end_tracking()
            self._complete_saves()
            raise
        except BaseException as error:
            self._report_failure(error)
            self._end_tracking()
            self._complete_saves()
            raise
        self._finish()

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
        self.emitter.emit(events.Note(time.time_ns(), text, "warning"))
        self.tracked.finish("preempted")
        process_control.die_of_sigterm()

    def _end_tracking(self) -> None:
        """Tell the trackers of a failed rank to finish now, because the rank is about to be stopped."""
        if self.failed:
            self.tracked.hurry(self.spec.supervision.grace_s)
            self.tracked.end(self._state())

    def _report_result(self, value: Any) -> None:
        """Report what rank 0's function has returned, if it can be stored as JSON."""
        if self.spec.rank != 0 or value is None or self.agreement.ends_early:
            return
        try:
            event: events.Event = events.Returned(time.time_ns(), as_json(value))
        except Exception as error:  # the user's value may raise anything when it is converted
            text = f"the workload's return value ({type(value).__name__}) is not stored: {error}"
            event = events.Note(time.time_ns(), clipped(text, 1_000), "warning")
        self.emitter.emit(event)

    def _complete_saves(self) -> None:
        """Complete the checkpoint that is being written, after a failure or while the worker group is being stopped."""
        if self.context is not None:
            with contextlib.suppress(Exception):  # the failure has been reported; this must not replace it
                self.context.close(self.spec.supervision.grace_s, failed=True)

    def _wait_for_all_ranks(self) -> None:
        """Wait until all ranks are connected; otherwise a rank that fails at once looks like a lost peer to other
        ranks.
        """
        if self.spec.group.backend == "gloo":  # NCCL connects later, in the first collective operation
            from torch import distributed

            distributed.barrier()

    def _finish(self) -> None:
        self.emitter.emit(events.Finished(time.time_ns()))
        self.finished = True

    def _report_exit(self, stop: SystemExit) -> None:
        code = failures.exit_code(stop)
        if code == 0:
            self._finish()
            return
        if code == EXIT_PREEMPTED and (self.spec.code.is_script or self.agreement.notified):
            self.preempted = True
            self.emitter.emit(events.Preempted(time.time_ns(), step=0))
            return
        if not isinstance(stop.code, int):
            _print_to_log(f"{stop.code}\n")  # as Python does
        failure = failures.bad_exit(stop, self.phase)
        recorded = self._read_error_file()
        self._fail(dataclasses.replace(recorded, exit_code=code) if recorded is not None else failure)

    def _report_failure(self, error: BaseException) -> None:
        failures.add_search_path(error)
        trace = user_traceback(error)
        hook = users_hook()
        if hook is None:
            self._print_traceback(trace)
        failure, recorded = failures.failure(error, self.phase), self._read_error_file()
        if recorded is not None and one_line(recorded.message) not in failure.message:
            failure = dataclasses.replace(recorded, lost_peer=failure.lost_peer, timed_out=failure.timed_out)
        self._fail(failure)
        if hook is not None:  # called after the report, because it may take long
            try:
                hook(type(error), error, users_frames(error.__traceback__))
            except BaseException as failed:  # any user's code
                _print_to_log(f"Error in sys.excepthook:\n{user_traceback(failed)}\nOriginal exception was:\n")
                self._print_traceback(trace)

    def _print_traceback(self, trace: str) -> None:
        _print_to_log(trace if self.spec.code.full_traceback else shortened(trace))

    def _report_handled(self) -> None:
        """Report the exception that the user's code is still handling; it may be the reason why other ranks have
        failed.
        """
        if self._state() == "crashed" and (failure := failures.handled(self.phase)) is not None:
            _print_to_log(f"ddptrain: the rank was asked to stop while it handled an exception:\n{failure.traceback}")
            self.emitter.emit(failure)

    def _read_error_file(self) -> events.Failure | None:
        """Return the error that a script has written to its error file, as torch elastic's record() does."""
        return (
            error_file.read_error_file(Path(self.spec.host.staging) / ERROR_FILE) if self.spec.code.is_script else None
        )

    def _fail(self, failure: events.Failure) -> None:
        self.failed = True
        self.emitter.emit(failure)


def _print_to_log(text: str) -> None:
    with contextlib.suppress(Exception):  # the user's code may have closed or replaced the stream
        sys.stderr.write(text)  # not print, which scripts replace so that only rank 0 prints
        sys.stderr.flush()


class StackWriter:
    """Writes the stacks of all threads to the file from which the worker reports them.

    This process writes them by itself on a command, else faulthandler does because of the worker's signal.
    """

    def __init__(self, spec: RankSpec) -> None:
        # Opened now, because faulthandler's C code cannot open files.
        self._dump_fd = open_append(Path(spec.host.staging) / STACKS_DUMP, create_mode=0o600)
        faulthandler.register(STACKS_SIGNAL, file=self._dump_fd, all_threads=True)

    def write(self) -> None:
        """Write the stacks, and then what is known about collective operations. For any thread but the main thread."""
        error = handled_error()
        handles = clipped(one_line(f"{type(error).__qualname__}: {message_of(error)}"), 300) if error else ""
        known = {"sequence": _sequence(), "handles": handles, "pending": _pending()}
        with contextlib.suppress(OSError):  # a full disk must not end the thread that handles commands
            faulthandler.dump_traceback(self._dump_fd, all_threads=True)
            os.write(self._dump_fd, f"{STACKS_END}{json.dumps(known)}\n".encode())


def _sequence() -> int | None:
    """Return the number of collective operations begun in the default group; None if unknown."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return None
        return int(c10d._get_default_group()._get_sequence_number_for_group())  # noqa: SLF001  # no public API
    except Exception:  # some backends do not count, and raise various errors
        return None


def _pending() -> str:
    """Return the oldest collective operation that torch's flight recorders know as not ended, as "all_reduce"."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    # NCCL has a recorder of its own, until torch 2.14; later each backend has one, gloo by default.
    readers = [("_dump_nccl_trace_json", ()), *(("_dump_fr_trace_json", (name,)) for name in ("nccl", "nccl2", "gloo"))]
    active: list[dict[str, Any]] = []
    for reader, backend in readers:
        with contextlib.suppress(Exception):  # this torch has no such recorder
            trace = json.loads(getattr(c10d, reader)(True, True, *backend))
            active += (entry for entry in trace.get("entries", []) if _is_pending(entry, trace["pg_status"]))
    oldest = min(active, key=lambda entry: entry["time_created_ns"], default={})
    return str(oldest.get("profiling_name", "")).rpartition(":")[2]


def _is_pending(entry: dict[str, Any], groups: dict[str, Any]) -> bool:
    """Return whether all ranks must join the operation, and neither it nor a later one of its group has ended."""
    ended = int(groups.get(str(entry["pg_id"]), {}).get("last_completed_collective", -1))
    return not entry["retired"] and not entry["is_p2p"] and entry["collective_seq_id"] > ended


def report_thread_failures(emitter: Emitter) -> None:
    """Report exceptions that end a thread. The rank continues, as in any Python program."""
    print_error = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        error = ended.exc_value
        if error is not None and not isinstance(error, SystemExit):
            name = ended.thread.name if ended.thread is not None else ""
            trace = clipped("".join(traceback.format_exception(error)), 100_000)
            message = clipped(message_of(error), 4_000)
            emitter.emit(events.ThreadFailure(time.time_ns(), name, type(error).__qualname__, message, trace))
        print_error(ended)

    threading.excepthook = hook
