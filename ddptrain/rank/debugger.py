"""The debugger of a rank, under --debug: pdb at the terminal of the command, or debugpy for an editor.

For pdb, sys.stdin asks the driver for each line, and what pdb prints is a part of the rank's log. The other ranks skip
their breakpoints, and wait for the debugged one in collective operations, without a time limit of less than days.
"""

from __future__ import annotations

import bdb
import contextlib
import datetime as dt
import functools
import inspect
import io
import os
import pdb  # noqa: T100  # it is the debugger
import queue
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any, ClassVar

from torch import distributed
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from ddptrain.errors import UsageError
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import DEBUG_TIMEOUT_S, Debug, RankSpec
from ddptrain.rank import failure
from ddptrain.rank.output import Emitter


def prepare(spec: RankSpec, debug: Debug, emitter: Emitter) -> Debugger | None:
    """Prepare this rank for the debugging of `debug.rank`; return the debugger if it is this one."""
    _wait_longer()
    if spec.rank != debug.rank:
        sys.breakpointhook = pdb.set_trace = lambda *_, **__: None
        return None
    return EditorDebugger(debug, emitter) if debug.port else TerminalDebugger(emitter)


def _wait_longer() -> None:
    """Replace the time limits of all process groups, also those that the user's code gives."""
    for name in ("init_process_group", "new_group", "split_group"):
        make = getattr(c10d, name)
        patient = functools.wraps(make)(functools.partial(_with_long_limit, make, inspect.signature(make)))
        for module in (c10d, distributed, device_mesh):
            setattr(module, name, patient)


def _with_long_limit(make: Any, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
    given = signature.bind(*args, **kwargs)
    given.arguments["timeout"] = dt.timedelta(seconds=DEBUG_TIMEOUT_S)
    return make(*given.args, **given.kwargs)


class Debugger:
    """The debugger of this rank.

    has_quit: the user has quit it, which ends the run. ends: the run was asked to end, so that SIGINT is no request.
    """

    has_quit = ends = False

    def begin(self) -> None:
        """Do what comes just before the user's code."""

    def post_mortem(self, error: BaseException) -> None:
        """Let the user look at an exception that has left the user's code."""

    def take(self, text: str) -> None:
        """Take a line of the user, in the thread of the commands."""


class TerminalDebugger(Debugger):
    """pdb, whose input and output are those of the command."""

    def __init__(self, emitter: Emitter) -> None:
        """Make pdb's functions, breakpoint() and Ctrl-C use this debugger."""
        self.emitter, self.depth = emitter, 0  # depth: how many prompts of pdb are open
        self.in_post_mortem = False
        self.pid = os.getpid()
        self.input = RelayedInput(self)
        sys.stdin = self.input
        RankPdb.debugger = self
        pdb.Pdb = RankPdb  # type: ignore[misc]
        if not os.environ.get("PYTHONBREAKPOINT"):
            sys.breakpointhook = self._on_breakpoint
        signal.signal(signal.SIGINT, self._on_interrupt)

    def take(self, text: str) -> None:
        """Take a line with its newline; "" is the end of the input."""
        self.input.lines.put(text)

    def left(self) -> None:
        """Report that the code goes on, unless a prompt of pdb is open."""
        if self.depth == 0:
            self.emitter.emit(events.DebuggerLeft(time.time_ns()))

    def post_mortem(self, error: BaseException) -> None:
        """Open pdb at the place of an exception, unless the exception only says that another rank has ended."""
        if not isinstance(error, Exception) or isinstance(error, bdb.BdbQuit) or failure.lost_peer(error):
            return
        self.in_post_mortem = True
        with contextlib.suppress(Exception):  # BdbQuit, and the code may have closed stdout: the failure is reported
            print("Uncaught exception. Entering post mortem debugging: the failure is reported when you leave it.")
            pdb.post_mortem(failure.users_frames(error.__traceback__))

    def _on_breakpoint(self, *args: Any, **kwargs: Any) -> None:
        if os.getpid() != self.pid:
            raise RuntimeError(IN_CHILD)
        frame = sys._getframe(1)  # noqa: SLF001
        if header := kwargs.get("header"):
            print(header)
        RankPdb().set_trace(frame)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.input.waits or os.getpid() != self.pid:
            raise KeyboardInterrupt
        RankPdb().sigint_handler(signal.Signals(signum), frame)  # type: ignore[arg-type]


IN_CHILD = (
    "breakpoint() in a child process of the rank, as in a worker of a DataLoader, which --debug does not reach: "
    "use num_workers=0"
)


class RankPdb(pdb.Pdb):
    """pdb that reports when it is left, and whether it was quit."""

    debugger: ClassVar[TerminalDebugger]

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Let the user type commands until the code goes on."""
        self.debugger.depth += 1
        try:
            super().interaction(*args, **kwargs)
        finally:
            self.debugger.depth -= 1
            self.debugger.left()

    def sigint_handler(self, signum: signal.Signals, frame: FrameType) -> None:
        """Open the debugger because of Ctrl-C."""
        if self.debugger.ends:
            raise KeyboardInterrupt
        super().sigint_handler(signum, frame)

    def do_quit(self, arg: str) -> bool:
        """q(uit) | exit: end the run."""
        frame, debugger = self.curframe, self.debugger
        if not debugger.in_post_mortem and frame is not None:
            debugger.has_quit = True
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
            debugger.emitter.emit(events.DebuggerLeft(time.time_ns(), place))
        self._user_requested_quit = True
        self.set_quit()
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815  # pdb's names


class RelayedInput(io.TextIOBase):
    """sys.stdin of the debugged rank: the driver reads each line from its terminal. `waits`: for a line."""

    encoding = "utf-8"

    def __init__(self, debugger: TerminalDebugger) -> None:
        super().__init__()
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.waits = False
        self._debugger = debugger

    def readable(self) -> bool:
        """Return True."""
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Return the line that the user types next, "" at the end of the input."""
        if os.getpid() != self._debugger.pid:
            return ""  # a forked child
        with contextlib.suppress(Exception):  # the user's code may have replaced or closed it
            sys.stdout.flush()
        self._debugger.emitter.emit(events.AsksForLine(time.time_ns(), os.fstat(1).st_size))
        self.waits = True
        try:
            return self.lines.get()
        finally:
            self.waits = False
            self._debugger.left()

    def read(self, size: int | None = -1) -> str:
        """Return all lines up to the end of the input."""
        return "".join(self)


class EditorDebugger(Debugger):
    """debugpy, to which an editor connects."""

    def __init__(self, debug: Debug, emitter: Emitter) -> None:
        self.debug, self.emitter = debug, emitter

    def begin(self) -> None:
        """Wait until an editor has connected. Raises UsageError if debugpy is not installed, or can't listen."""
        here = socket.gethostname()
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of Python's own modules
        try:
            import debugpy  # noqa: T100
        except ImportError:
            raise UsageError(f"--listen needs debugpy in {sys.prefix} on host {here}: pip install debugpy") from None
        address, port = self.debug.address, self.debug.port
        try:
            debugpy.listen((address, port))  # noqa: T100
        except RuntimeError as error:
            raise UsageError(f"--listen {address}:{port}: debugpy cannot listen there: {error}") from error
        launch = f'{{"type": "debugpy", "request": "attach", "connect": {{"host": "{address}", "port": {port}}}}}'
        where = f"{address}:{port} of host {here}"
        self.emitter.note(f"debugpy listens on {where} and waits for an editor; in launch.json: {launch}")
        debugpy.wait_for_client()  # noqa: T100
        self.emitter.note("an editor has connected, the code begins")
