"""The rank server: a process that has torch imported and forks a rank on request.

It belongs to one worker, over a socket pair, or to the workers of one host that share it, over a socket that they
connect to (`socketfolder`). One packet is one message, with file descriptors where it needs them. Children belong to
the connection that ordered them and end when it ends; the server ends with its last connection.

    request  {"op": "rank", "id", "place", "cpus"} + fds [spec, log, events]
             {"op": "store", "id", "host", "port"} + fd [listening]      {"op": "stop", "id", "grace_s"}
             {"op": "tell", "id", "order"}: a word for the rank, see `orders`
    report   {"report": "ready", "pid", "warm"}   {"report": "started", "id", "pid"}
             {"report": "exited", "id", "pid", "status", "time_ns"}
             {"report": "broken", "message"}: the server can't serve; with "id": that child could not be started

A place (a GPU, or a worker's slot) holds one rank at a time: an order for a place that is taken waits until the rank
there has really ended. `cpus` are the cores that the rank may use.

The server runs no op and touches no CUDA, so that a fork is as good as a fresh process; where another thread is
found in it, or a rank's environment must be there before the program starts, the rank is started cold instead.
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

from ddptrain.protocol import commands, socket_dir
from ddptrain.rank.server import children, process_control

MAX_MESSAGE_BYTES = 64 * 1024
ORPHAN_GRACE_S = 2.0  # how long ranks may take to end once their worker is gone
PLACE_TIMEOUT_S = 60.0  # how long a rank may wait for its place; a killed process is gone in far less
_MAX_FDS = 4


class Connection:
    """A worker's end: requests come from it, reports go to it."""

    def __init__(self, link: socket.socket) -> None:
        self.socket = link
        self.closing = False  # it orders nothing any more; its children are being stopped

    def take(self) -> tuple[dict[str, Any] | None, list[int]]:
        """The next request and its descriptors; None at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, MAX_MESSAGE_BYTES, _MAX_FDS)
        except OSError:
            return None, []
        for fd in fds:
            os.set_inheritable(fd, False)
        return (json.loads(data), fds) if data else (None, fds)

    def report(self, **message: Any) -> None:
        """Tell the worker; one that is gone, or takes no reports, will be found out by the selector."""
        try:
            self.socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.socket.shutdown(socket.SHUT_RDWR)  # hundreds of reports wait: it hangs, and must not stop the others
        except OSError:
            pass


@dataclass
class Child:
    """A process that was started: a rank or a store; its process group has the same number."""

    id: str
    pid: int
    place: str  # "" for what needs none
    owner: Connection
    orders_fd: int | None = None  # the server's end of the pipe that a rank reads orders from
    kill_at: float | None = None  # monotonic seconds; set once it was asked to stop


@dataclass
class Order:
    """A rank to be started once its place is free."""

    id: str
    place: str
    cpus: list[int] | None
    fds: list[int]
    owner: Connection
    until: float = field(default_factory=lambda: time.monotonic() + PLACE_TIMEOUT_S)

    def close(self) -> None:
        """Let go of the descriptors."""
        for fd in self.fds:
            os.close(fd)


class RankServer:
    """Serves workers until the last one is gone: the one at `control`, or those that come to the shared `listener`."""

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
        self.orders: list[Order] = []
        self.warm = False
        self.serving = False
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Import what ranks need, say "ready", and serve until the workers are gone and every child has ended."""
        process_control.name_process("ddptrain-ranks")
        process_control.become_subreaper()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up pipe to be written
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._import_torch()
        self._selector.register(self._wake_r, selectors.EVENT_READ, lambda: os.read(self._wake_r, 4096))
        if self.listener is not None:
            self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.serving = True
        self._greet(self.connections)
        self._accept()
        while not self._is_over():
            for key, _ in self._selector.select(self._timeout_s()):
                serve: Callable[[], object] = key.data
                serve()
            self._reap()
            self._kill_overdue()
            self._start_waiting()
        process_control.kill_descendants()

    def _import_torch(self) -> None:
        try:
            from ddptrain.rank.server import warmup

            warmup.import_everything()
        except BaseException:
            message = traceback.format_exc()
            while not self._retire():
                pass  # once nobody can come any more, all that came are told
            for connection in self.connections:
                connection.report(report="broken", message=message)
            raise
        self.warm = process_control.thread_count() == 1
        gc.freeze()  # forked ranks then share these pages instead of copying them at their first collection

    # --- connections ---

    def _accept(self) -> bool:
        """Take in the workers that have come; whether there were any."""
        came = []
        while self.listener is not None:
            try:
                link, _ = self.listener.accept()
            except BlockingIOError:
                break
            link.setblocking(True)
            came.append(Connection(link))
        self.connections += came
        if self.serving:
            self._greet(came)
        return bool(came)

    def _greet(self, came: Iterable[Connection]) -> None:
        """Hear requests of these workers from now on."""
        for connection in came:
            take = functools.partial(self._take_request, connection)
            self._selector.register(connection.socket, selectors.EVENT_READ, take)
            connection.report(report="ready", pid=os.getpid(), warm=self.warm)

    def _retire(self) -> bool:
        """Whether nobody is about to come; the shared folder is removed then, so that nobody can."""
        if self.folder is None:
            return True
        with socket_dir.locked(self.folder) as folder:
            if self._accept():
                return False
            folder.remove()
        return True

    def _take_request(self, connection: Connection) -> None:
        request, fds = connection.take()
        if request is None:
            self._close(connection)
            return
        try:
            self._serve_request(connection, request, fds)
        except Exception:
            connection.report(report="broken", id=request.get("id"), message=traceback.format_exc())
            for fd in fds:
                os.close(fd)

    def _serve_request(self, connection: Connection, request: Mapping[str, Any], fds: list[int]) -> None:
        if request["op"] == "rank":
            self.orders.append(Order(request["id"], request["place"], request["cpus"], fds, connection))
        elif request["op"] == "stop":
            self._stop(connection, request["id"], request["grace_s"])
        elif request["op"] == "tell":
            self._tell(connection, request["id"], request["order"])
        else:
            pid = children.start_store(request["host"], request["port"], fds[0], close=self._own_fds())
            os.close(fds[0])
            self._adopt(Child(request["id"], pid, "", connection))

    def _close(self, connection: Connection) -> None:
        """The worker is gone, or wants no more: so are its ranks."""
        self._selector.unregister(connection.socket)
        connection.closing = True
        for order in [order for order in self.orders if order.owner is connection]:
            self._drop(order)
        for child in [child for child in self.children.values() if child.owner is connection]:
            self._stop(connection, child.id, ORPHAN_GRACE_S)

    def _is_over(self) -> bool:
        """Hang up on the workers that are done and have heard of their last child's end; whether that were all."""
        owners = [child.owner for child in self.children.values()]
        done = [connection for connection in self.connections if connection.closing and connection not in owners]
        # The last one to be hung up on finds that nothing is left.
        over = len(done) == len(self.connections) and not self.children and self._retire()
        for connection in done:
            connection.socket.close()
            self.connections.remove(connection)
        return over

    # --- children ---

    def _start_waiting(self) -> None:
        """Start the ranks whose place is free, in the order in which they came."""
        for order in list(self.orders):
            holder = next((child for child in self.children.values() if child.place == order.place), None)
            if holder is None:
                self._start(order)
            elif order.until <= time.monotonic():
                self._drop(order)
                order.owner.report(
                    report="broken",
                    id=order.id,
                    message=f"the slot ({order.place}) is still held by {holder.id} (pid {holder.pid}), "
                    f"which has not ended within {PLACE_TIMEOUT_S:.0f} s",
                )

    def _start(self, order: Order) -> None:
        try:
            if order.cpus is not None:
                os.sched_setaffinity(0, order.cpus)  # the child inherits it; to the server itself it is all the same
            child = self._start_rank(order)
        except Exception:
            order.owner.report(report="broken", id=order.id, message=traceback.format_exc())
        else:
            self._adopt(child)
        self._drop(order)

    def _start_rank(self, order: Order) -> Child:
        """Start the rank, with a pipe that it hears orders from for as long as it lives."""
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        try:
            spec_fd, log_fd, events_fd = order.fds
            close = [*self._own_fds(), ours]
            pid = children.start_rank(spec_fd, log_fd, events_fd, theirs, warm=self.warm, close=close)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Child(order.id, pid, order.place, order.owner, ours)

    def _tell(self, owner: Connection, child_id: str, order: str) -> None:
        """Pass an order on; a rank that has ended, or reads none, is none the wiser."""
        for child in self.children.values():
            if (child.owner, child.id) == (owner, child_id) and child.orders_fd is not None:
                with contextlib.suppress(OSError):
                    os.write(child.orders_fd, f"{order}\n".encode())

    def _adopt(self, child: Child) -> None:
        self.children[child.pid] = child
        child.owner.report(report="started", id=child.id, pid=child.pid)

    def _drop(self, order: Order) -> None:
        self.orders.remove(order)
        order.close()

    def _own_fds(self) -> list[int]:
        """What a forked child must not keep."""
        sockets = [connection.socket for connection in self.connections]
        sockets += [self.listener] if self.listener is not None else []
        waiting = [fd for order in self.orders for fd in order.fds]
        told = [child.orders_fd for child in self.children.values() if child.orders_fd is not None]
        return (
            [link.fileno() for link in sockets] + waiting + told + [self._wake_r, self._wake_w, self._selector.fileno()]
        )

    def _stop(self, owner: Connection, child_id: str, grace_s: float) -> None:
        for order in [order for order in self.orders if (order.owner, order.id) == (owner, child_id)]:
            self._drop(order)
            owner.report(report="exited", id=child_id, pid=0, status=-signal.SIGTERM, time_ns=time.time_ns())
        for child in self.children.values():
            if (child.owner, child.id) == (owner, child_id):
                self._tell(owner, child_id, commands.STOP)
                kill_at = time.monotonic() + grace_s
                child.kill_at = kill_at if child.kill_at is None else min(child.kill_at, kill_at)
                process_control.signal_group(child.pid, signal.SIGTERM)

    def _reap(self) -> None:
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
                continue  # an orphan of a rank
            process_control.signal_group(pid, signal.SIGKILL)  # what a rank leaves behind ends with it
            if child.orders_fd is not None:
                os.close(child.orders_fd)
            code = os.waitstatus_to_exitcode(status)
            child.owner.report(report="exited", id=child.id, pid=pid, status=code, time_ns=time_ns)
            if not self.children:
                process_control.kill_descendants()

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self.children.values():
            if child.kill_at is not None and child.kill_at <= now:
                process_control.signal_group(child.pid, signal.SIGKILL)
                child.kill_at = now + 1.0

    def _timeout_s(self) -> float | None:
        deadlines = [child.kill_at for child in self.children.values() if child.kill_at is not None]
        deadlines += [order.until for order in self.orders]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def main() -> None:
    """Entry point of the process: `private FD`, its worker's socket, or `shared FD FOLDER`, a listening one."""
    gc.disable()  # collecting while torch is imported takes a fifth of the time and finds nothing
    kind, fd, *folder = sys.argv[1:]
    link = socket.socket(fileno=int(fd))
    if kind == "private":
        RankServer(control=link).serve()
    else:
        link.setblocking(False)
        RankServer(listener=link, folder=Path(folder[0])).serve()


if __name__ == "__main__":
    main()
