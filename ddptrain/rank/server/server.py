"""The rank server: a process that imports torch once and forks ranks on request.

The server serves one worker over a socket pair, or all workers of a host over a listening socket
(`protocol/socket_dir.py`). A packet is one JSON message, some with file descriptors. A child belongs to the connection
that requested it, and is stopped when this connection ends. The server exits after its last connection.

    request  {"op": "rank", "id", "slot", "cpus"} + fds [spec, log, events]
             {"op": "store", "id", "host", "port"} + fd [listening]      {"op": "stop", "id", "grace_s"}
             {"op": "command", "id", "command"}: a command for the rank, see `protocol/commands.py`
    report   {"report": "ready", "pid", "warm"}   {"report": "started", "id", "pid", "how"}: "forked" or "cold: why"
             {"report": "exited", "id", "pid", "status", "time_ns"}
             {"report": "broken", "message"}: the server cannot serve; with "id": this child could not be started

`slot` names a GPU or a slot of one worker. A slot has one rank at a time: a new rank waits until the old process has
exited. `cpus` are the cores that the rank may use.

The server runs no torch operation and never initializes CUDA, so a forked rank is equivalent to a fresh process. If
the server has a second thread, or a rank's environment must be set before the interpreter starts, the rank is
started as a fresh process instead (a cold start).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddptrain import log
from ddptrain.errors import UsageError
from ddptrain.protocol import commands, socket_dir
from ddptrain.rank.server import children, process_control

MAX_MESSAGE_BYTES = 64 * 1024
ORPHAN_GRACE_S = 2.0  # between SIGTERM and SIGKILL for ranks whose worker has ended
SLOT_TIMEOUT_S = 60.0  # the longest wait of a rank for its slot; a killed process exits much faster
_MAX_FDS = 4

_log = log.Log("ddptrain.rank.server")


class Connection:
    """The connection to one worker: receives requests, sends reports."""

    def __init__(self, link: socket.socket) -> None:
        self.socket = link
        self.closing = False  # the worker sends no more requests, and its children are being stopped

    def receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """Return the next request and its file descriptors; None at the end of the connection."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, MAX_MESSAGE_BYTES, _MAX_FDS)
        except OSError:
            return None, []
        for fd in fds:
            os.set_inheritable(fd, False)
        return (json.loads(data), fds) if data else (None, fds)

    def report(self, **message: Any) -> None:
        """Send a report without blocking. The selector notices a worker that has ended."""
        try:
            self.socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.socket.shutdown(socket.SHUT_RDWR)  # a worker that hangs must not block the other workers
        except OSError:
            pass


@dataclass
class Child:
    """A running rank or store; `pid` is also the id of its process group."""

    id: str
    pid: int
    slot: str  # "" for a store
    owner: Connection
    how: str = "forked"
    commands_fd: int | None = None  # write end of the pipe from which a rank reads commands
    kill_at: float | None = None  # monotonic seconds; set when the child was asked to stop


@dataclass
class QueuedRank:
    """A rank that waits until its slot is free."""

    id: str
    slot: str
    cpus: list[int] | None
    fds: list[int]
    owner: Connection
    deadline: float = field(default_factory=lambda: time.monotonic() + SLOT_TIMEOUT_S)


class RankServer:
    """Serves the worker at `control`, or the workers that connect to the shared `listener`, until all have ended."""

    def __init__(
        self,
        control: socket.socket | None = None,
        listener: socket.socket | None = None,
        folder: Path | None = None,
    ) -> None:
        self.connections = [Connection(control)] if control is not None else []
        self.listener = listener
        self.folder = folder
        self.children: dict[int, Child] = {}
        self.queue: list[QueuedRank] = []
        self.why_cold = "it still imports"  # the reason why no rank can be forked; "" if ranks can be forked
        self.serving = False
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Import torch, report "ready", and serve until all workers have ended and all children have exited."""
        process_control.name_process("ddptrain-ranks", "ddptrain rank server")
        process_control.become_subreaper()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the wake-up pipe
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._import_torch()
        self._selector.register(self._wake_r, selectors.EVENT_READ, lambda: os.read(self._wake_r, 4096))
        if self.listener is not None:
            self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.serving = True
        self._greet(self.connections)
        while not self._is_over():
            for key, _ in self._selector.select(self._timeout_s()):
                handle: Callable[[], object] = key.data
                handle()
            self._reap()
            self._kill_overdue()
            self._start_queued()
        process_control.kill_descendants()

    def _import_torch(self) -> None:
        try:
            from ddptrain.rank.server import warmup

            warmup.import_everything()
        except BaseException:
            message = traceback.format_exc()
            while not self._retire():
                pass  # a worker has just connected; after this loop none can, and all that are connected get the report
            for connection in self.connections:
                connection.report(report="broken", message=message)
            raise
        threads = process_control.thread_count()
        self.why_cold = "" if threads == 1 else f"the rank server has {threads} threads"
        _log.info("rank server ready", pid=os.getpid(), warm=not self.why_cold, why_cold=self.why_cold or None)
        gc.freeze()  # forked ranks share these pages; otherwise their first garbage collection would copy them

    # --- connections ---

    def _accept(self) -> bool:
        """Accept all pending connections. Return whether there were any."""
        accepted = []
        while self.listener is not None:
            try:
                link, _ = self.listener.accept()
            except BlockingIOError:
                break
            link.setblocking(True)
            accepted.append(Connection(link))
        self.connections += accepted
        if self.serving:
            self._greet(accepted)
        return bool(accepted)

    def _greet(self, connections: Iterable[Connection]) -> None:
        """Start to read requests of these workers, and report "ready" to them."""
        for connection in connections:
            handle = functools.partial(self._handle_request, connection)
            self._selector.register(connection.socket, selectors.EVENT_READ, handle)
            connection.report(report="ready", pid=os.getpid(), warm=not self.why_cold)

    def _retire(self) -> bool:
        """Remove the shared folder, so that no worker can connect. Return False if a worker has just connected."""
        if self.folder is None:
            return True
        with socket_dir.locked(self.folder) as folder:
            if self._accept():
                return False
            folder.remove()
        return True

    def _handle_request(self, connection: Connection) -> None:
        request, fds = connection.receive()
        if request is None:
            self._close(connection)
            return
        try:
            self._execute(connection, request, fds)
        except Exception:  # a bad request must not end the ranks of other workers
            connection.report(report="broken", id=request.get("id"), message=traceback.format_exc())
            _close_all(fds)

    def _execute(self, connection: Connection, request: Mapping[str, Any], fds: list[int]) -> None:
        if request["op"] == "rank":
            self.queue.append(QueuedRank(request["id"], request["slot"], request["cpus"], fds, connection))
        elif request["op"] == "stop":
            self._stop(connection, request["id"], request["grace_s"])
        elif request["op"] == "command":
            self._send_command(connection, request["id"], request["command"])
        else:
            pid = children.start_store(request["host"], request["port"], fds[0], close=self._fds_to_close())
            os.close(fds[0])
            self._adopt(Child(request["id"], pid, "", connection))

    def _close(self, connection: Connection) -> None:
        """Stop the ranks of a worker that has ended or closed the connection."""
        self._selector.unregister(connection.socket)
        connection.closing = True
        for queued in [queued for queued in self.queue if queued.owner is connection]:
            self._dequeue(queued)
        for child in [child for child in self.children.values() if child.owner is connection]:
            self._stop(connection, child.id, ORPHAN_GRACE_S)

    def _is_over(self) -> bool:
        """Close the connections whose children have all exited. Return whether nothing is left to serve."""
        owners = [child.owner for child in self.children.values()]
        done = [connection for connection in self.connections if connection.closing and connection not in owners]
        # Retire before the last connection is closed, because its worker expects that the folder has been deleted.
        over = len(done) == len(self.connections) and not self.children and self._retire()
        for connection in done:
            connection.socket.close()
            self.connections.remove(connection)
        return over

    # --- children ---

    def _start_queued(self) -> None:
        """Start the ranks whose slot is free, in the order of their requests."""
        for queued in list(self.queue):
            holder = next((child for child in self.children.values() if child.slot == queued.slot), None)
            if holder is None:
                self._start(queued)
            elif queued.deadline <= time.monotonic():
                self._dequeue(queued)
                message = (
                    f"the slot ({queued.slot}) is still held by {holder.id} (pid {holder.pid}), "
                    f"which has not ended within {SLOT_TIMEOUT_S:.0f} s"
                )
                queued.owner.report(report="broken", id=queued.id, message=message)

    def _start(self, queued: QueuedRank) -> None:
        try:
            if queued.cpus is not None:
                os.sched_setaffinity(0, queued.cpus)  # the child inherits this; the server itself may run on any core
            child = self._start_rank(queued)
        except Exception:  # this rank cannot start; others can
            queued.owner.report(report="broken", id=queued.id, message=traceback.format_exc())
        else:
            self._adopt(child)
        self._dequeue(queued)

    def _start_rank(self, queued: QueuedRank) -> Child:
        """Start a rank, with a pipe for its commands."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        try:
            spec_fd, log_fd, events_fd = queued.fds
            close = [*self._fds_to_close(), write_end]
            pid, how = children.start_rank(spec_fd, log_fd, events_fd, read_end, why_cold=self.why_cold, close=close)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return Child(queued.id, pid, queued.slot, queued.owner, how, write_end)

    def _send_command(self, owner: Connection, child_id: str, command: str) -> None:
        """Send a command to a rank, if it is still running and reads commands."""
        for child in self._children_of(owner, child_id):
            if child.commands_fd is not None:
                with contextlib.suppress(OSError):
                    os.write(child.commands_fd, f"{command}\n".encode())

    def _children_of(self, owner: Connection, child_id: str) -> list[Child]:
        return [child for child in self.children.values() if (child.owner, child.id) == (owner, child_id)]

    def _adopt(self, child: Child) -> None:
        self.children[child.pid] = child
        child.owner.report(report="started", id=child.id, pid=child.pid, how=child.how)
        _log.info("child started", id=child.id, pid=child.pid, how=child.how, slot=child.slot)

    def _dequeue(self, queued: QueuedRank) -> None:
        self.queue.remove(queued)
        _close_all(queued.fds)

    def _fds_to_close(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        links: list[Any] = [connection.socket for connection in self.connections]
        links += [self._selector, *([self.listener] if self.listener is not None else [])]
        queued = [fd for queued in self.queue for fd in queued.fds]
        pipes = [child.commands_fd for child in self.children.values() if child.commands_fd is not None]
        return [link.fileno() for link in links] + queued + pipes + [self._wake_r, self._wake_w]

    def _stop(self, owner: Connection, child_id: str, grace_s: float) -> None:
        for queued in [queued for queued in self.queue if (queued.owner, queued.id) == (owner, child_id)]:
            self._dequeue(queued)
            owner.report(report="exited", id=child_id, pid=0, status=-signal.SIGTERM, time_ns=time.time_ns())
        self._send_command(owner, child_id, commands.Command.STOP)
        for child in self._children_of(owner, child_id):
            kill_at = time.monotonic() + grace_s
            child.kill_at = kill_at if child.kill_at is None else min(child.kill_at, kill_at)
            _log.info("SIGTERM to a child", id=child_id, pid=child.pid, grace_s=grace_s)
            process_control.signal_group(child.pid, signal.SIGTERM)

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
            child = self.children.pop(pid, None)
            if child is None:
                continue  # an orphaned child of a rank
            process_control.signal_group(pid, signal.SIGKILL)
            if child.commands_fd is not None:
                os.close(child.commands_fd)
            code = os.waitstatus_to_exitcode(status)
            _log.info("child ended", id=child.id, pid=pid, status=code)
            child.owner.report(report="exited", id=child.id, pid=pid, status=code, time_ns=time_ns)
            if not self.children:
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
        """Return the seconds until the next deadline; None if there is none."""
        deadlines = [child.kill_at for child in self.children.values() if child.kill_at is not None]
        deadlines += [queued.deadline for queued in self.queue]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def main() -> None:
    """Run the server. Arguments: `private FD` (its worker's socket) or `shared FD FOLDER` (a listening socket)."""
    gc.disable()  # garbage collection takes a fifth of torch's import time and finds nothing
    with contextlib.suppress(UsageError):  # the driver has already reported a wrong DDPTRAIN_LOG
        log.to_stderr()
    kind, fd, *folder = sys.argv[1:]
    link = socket.socket(fileno=int(fd))
    if kind == "private":
        RankServer(control=link).serve()
    else:
        link.setblocking(False)
        RankServer(listener=link, folder=Path(folder[0])).serve()
