"""The rank server: a process that imports torch once and forks ranks on request of one worker.

Worker and server have a socket pair. A packet is one JSON message, some with file descriptors.

    request  {"op": "fork", "id", "slot"} + fds [spec, log, events]
             {"op": "store", "id", "host", "port"} + fd [listening]      {"op": "stop", "id", "grace_s"}
             {"op": "command", "id", "command"}: a command for the rank, see `protocol/commands.py`
    report   {"report": "ready", "pid", "warm"}   {"report": "started", "id", "pid", "how"}: "forked" or "cold: why"
             {"report": "exited", "id", "pid", "status", "time_ns"}
             {"report": "broken", "message"}: the server cannot serve; with "id": this child could not be started

A slot (a GPU, or a share of the CPU) has one rank at a time: a new rank waits until the old process has exited. When
the worker ends or closes its socket, the server stops its children and exits.

The server runs no torch operation and never initializes CUDA, so a forked rank is equivalent to a fresh process. If
the server has a second thread, or a rank's environment must be set before the interpreter starts, the rank is
started as a fresh process instead (a cold start).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ddptrain import log
from ddptrain.errors import UsageError
from ddptrain.protocol import commands, deadlines
from ddptrain.protocol.exec_env import exec_only, python_command
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank import process_control

MAX_MESSAGE_BYTES = 64 * 1024
SLOT_TIMEOUT_S = 60.0  # the longest wait of a rank for its slot; a killed process exits much faster
_MAX_FDS = 4
_READ_AT_START = exec_only(os.environ)  # before torch is imported, which sets variables itself

_log = log.Log("ddptrain.rank-server")


@dataclass
class Child:
    """A rank or a store; `pid`, which is also the id of its process group, is 0 while a rank waits for its slot."""

    id: str
    slot: str = ""  # "" for a store
    fds: list[int] = field(default_factory=list)  # spec, log and events of a rank, until it is started
    deadline: float = 0.0  # monotonic seconds: until then a rank waits for its slot
    pid: int = 0
    how: str = "forked"
    commands_fd: int | None = None  # write end of the pipe from which a rank reads commands
    kill_at: float | None = None  # monotonic seconds; set when the child was asked to stop


class RankServer:
    """Serves the worker at the other end of `link` until this ends and all children have exited."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.children: dict[str, Child] = {}  # by id, in the order of the requests
        self.why_cold = ""  # the reason why no rank can be forked; "" if ranks can be forked
        self.closing = False  # the worker sends no more requests
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Import torch, report "ready", and serve until the worker has ended and all children have exited."""
        process_control.name_process("ddptrain-ranks", "ddptrain rank server")
        process_control.become_subreaper()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the wake-up pipe
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._import_torch()
        self._selector.register(self._wake_r, selectors.EVENT_READ, lambda: os.read(self._wake_r, 4096))
        self._selector.register(self.link, selectors.EVENT_READ, self._handle_request)
        self._report(report="ready", pid=os.getpid(), warm=not self.why_cold)
        while not self.closing or self.children:
            for key, _ in self._selector.select(self._timeout_s()):
                handle: Callable[[], object] = key.data
                handle()
            self._reap()
            self._kill_overdue()
            self._start_waiting()
        process_control.kill_descendants()

    def _import_torch(self) -> None:
        try:
            from ddptrain.rank import warmup

            warmup.import_everything()
        except BaseException:
            self._report(report="broken", message=traceback.format_exc())
            raise
        threads = max(1, len(process_control.thread_names()))
        self.why_cold = "" if threads == 1 else f"the rank server has {threads} threads"
        _log.info("rank server ready", pid=os.getpid(), warm=not self.why_cold, why_cold=self.why_cold or None)
        gc.freeze()  # forked ranks share these pages; otherwise their first garbage collection would copy them

    # --- requests and reports ---

    def _report(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the selector notices a worker that has ended
            self.link.send(json.dumps(message).encode())

    def _handle_request(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.link, MAX_MESSAGE_BYTES, _MAX_FDS)
        except OSError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        if not data:  # the worker has ended or closed the connection
            self._selector.unregister(self.link)
            self.closing = True
            for child in list(self.children.values()):
                self._stop(child, deadlines.ORPHAN_GRACE_S)
            return
        request = json.loads(data)
        try:
            self._execute(request, fds)
        except Exception:  # a bad request must not end other ranks
            self._report(report="broken", id=request.get("id"), message=traceback.format_exc())
            _close_all(fds)

    def _execute(self, request: Mapping[str, Any], fds: list[int]) -> None:
        child = self.children.get(request["id"])
        match request["op"]:
            case "fork":
                waiting = Child(request["id"], request["slot"], fds, time.monotonic() + SLOT_TIMEOUT_S)
                self.children[waiting.id] = waiting
            case "store":
                pid = self._fork(lambda: _run_store(request["host"], request["port"], fds[0]), keep=fds)
                _close_all(fds)
                self._started(Child(request["id"], pid=pid))
            case "command" if child is not None:
                self._send_command(child, request["command"])
            case "stop" if child is not None:
                self._stop(child, request["grace_s"])

    def _send_command(self, child: Child, command: str) -> None:
        if child.commands_fd is not None:
            with contextlib.suppress(OSError):
                os.write(child.commands_fd, f"{command}\n".encode())

    def _stop(self, child: Child, grace_s: float) -> None:
        if not child.pid:
            self._forget(child)
            self._report(report="exited", id=child.id, pid=0, status=-signal.SIGTERM, time_ns=time.time_ns())
            return
        self._send_command(child, commands.Command.STOP)
        kill_at = time.monotonic() + grace_s
        child.kill_at = kill_at if child.kill_at is None else min(child.kill_at, kill_at)
        _log.info("SIGTERM to a child", id=child.id, pid=child.pid, grace_s=grace_s)
        process_control.signal_group(child.pid, signal.SIGTERM)

    # --- starts ---

    def _start_waiting(self) -> None:
        """Start the ranks whose slot is free, in the order of their requests."""
        for child in [child for child in self.children.values() if not child.pid]:
            holder = next((each for each in self.children.values() if each.pid and each.slot == child.slot), None)
            if holder is not None and time.monotonic() < child.deadline:
                continue
            try:
                if holder is not None:
                    raise TimeoutError(
                        f"the slot ({child.slot}) is still held by {holder.id} (pid {holder.pid}), "
                        f"which has not ended within {SLOT_TIMEOUT_S:.0f} s"
                    )
                self._start_rank(child)
            except Exception as error:  # this rank cannot start; others can
                message = str(error) if isinstance(error, TimeoutError) else traceback.format_exc()
                self._report(report="broken", id=child.id, message=message)
                self._forget(child)

    def _start_rank(self, child: Child) -> None:
        """Start a rank with a pipe for its commands: by a fork if this is equivalent to a fresh process."""
        from ddptrain.rank import lifecycle

        spec_fd, log_fd, events_fd = child.fds
        os.lseek(spec_fd, 0, os.SEEK_SET)
        with open(spec_fd, encoding="utf-8", closefd=False) as file:
            spec = RankSpec.from_json(file.read())
        why_cold = self.why_cold
        wanted = exec_only(spec.env)
        names = (name for name in wanted.keys() | _READ_AT_START.keys() if wanted.get(name) != _READ_AT_START.get(name))
        if not why_cold and (differing := sorted(names)):
            why_cold = f"only a new process reads {', '.join(differing)}"
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        try:
            if why_cold:
                os.lseek(spec_fd, 0, os.SEEK_SET)
                child.pid = _start_cold(spec.env, (spec_fd, log_fd, events_fd, read_end), why_cold)
                child.how = f"cold: {why_cold}"
            else:
                kept = log_fd, events_fd, read_end
                child.pid = self._fork(lambda: lifecycle.run_rank(spec, *kept), keep=kept, close=(write_end,))
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        child.commands_fd = write_end
        _close_all(child.fds)
        child.fds = []
        self._started(child)

    def _fork(self, main: Callable[[], int], *, keep: Iterable[int], close: Iterable[int] = ()) -> int:
        """Run `main` in a forked child, which closes the server's descriptors except `keep`. Return its pid."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            of_children = [fd for child in self.children.values() for fd in (*child.fds, child.commands_fd) if fd]
            own = [self.link.fileno(), self._selector.fileno(), self._wake_r, self._wake_w]
            _become_child(main, {*own, *of_children, *close} - {*keep}, server)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does the same, so that the group exists before either of them continues
        return pid

    def _started(self, child: Child) -> None:
        self.children[child.id] = child
        self._report(report="started", id=child.id, pid=child.pid, how=child.how)
        _log.info("child started", id=child.id, pid=child.pid, how=child.how, slot=child.slot)

    def _forget(self, child: Child) -> None:
        del self.children[child.id]
        _close_all(child.fds)

    # --- ends ---

    def _reap(self) -> None:
        """Report all children that have exited, and kill the other processes of their groups."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            time_ns = time.time_ns()
            child = next((each for each in self.children.values() if each.pid == pid), None)
            if child is None:
                continue  # an orphaned child of a rank
            process_control.signal_group(pid, signal.SIGKILL)
            if child.commands_fd is not None:
                os.close(child.commands_fd)
            self._forget(child)
            code = os.waitstatus_to_exitcode(status)
            _log.info("child ended", id=child.id, pid=pid, status=code)
            self._report(report="exited", id=child.id, pid=pid, status=code, time_ns=time_ns)
            if not any(each.pid for each in self.children.values()):
                process_control.kill_descendants()

    def _kill_overdue(self) -> None:
        """Send SIGKILL to children whose grace period is over, every second until they have exited."""
        now = time.monotonic()
        for child in self.children.values():
            if child.kill_at is not None and child.kill_at <= now:
                _log.info("SIGKILL to a child, its grace period is over", id=child.id, pid=child.pid)
                process_control.signal_group(child.pid, signal.SIGKILL)
                child.kill_at = now + 1.0

    def _timeout_s(self) -> float | None:
        times = [child.kill_at if child.pid else child.deadline for child in self.children.values()]
        return max(0.0, min(known) - time.monotonic()) if (known := [at for at in times if at is not None]) else None


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
        _close_all(close)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _start_cold(env: Mapping[str, str], fds: tuple[int, int, int, int], why: str) -> int:
    child = subprocess.Popen(
        [*python_command("ddptrain.rank.lifecycle"), *map(str, fds), str(os.getpid()), why],
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


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def main() -> None:
    """Run the server. Argument: the descriptor of its worker's socket."""
    gc.disable()  # garbage collection takes a fifth of torch's import time and finds nothing
    with contextlib.suppress(UsageError):  # the driver has already reported a wrong DDPTRAIN_LOG
        log.to_stderr()
    RankServer(socket.socket(fileno=int(sys.argv[1]))).serve()
