"""The rank server: a process that has torch imported and forks a rank on request.

It belongs to the worker that started it. Over a socket pair (one message a packet) it takes requests with file
descriptors and reports what became of them; the end of that socket is the end of the server and of every rank.

    request  {"op": "rank", "id"} + fds [spec, log, events]      {"op": "store", "id", "host", "port"} + fd [listening]
             {"op": "stop", "id", "grace_s"}
    report   {"report": "ready", "pid", "warm"}   {"report": "started", "id", "pid"}
             {"report": "exited", "id", "pid", "status", "time_ns"}   {"report": "broken", "message"}

The server runs no op and touches no CUDA, so that a fork is as good as a fresh process; where another thread is
found in it, or a rank's environment must be there before the program starts, the rank is started cold instead.
"""

from __future__ import annotations

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ddptrain.rank import procs

MAX_MESSAGE_BYTES = 64 * 1024
ORPHAN_GRACE_S = 2.0  # how long ranks may take to end once their worker is gone

# Read by the C library or the interpreter when a program starts; a fork can't apply them any more.
EXEC_ONLY_PREFIXES = ("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OPENBLAS_", "MKL_", "KMP_", "GOMP_")
EXEC_ONLY_IGNORED = frozenset({"PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS"})


@dataclass
class Child:
    """A forked process: a rank or a store; its process group has the same number."""

    id: str
    pid: int
    kill_at: float | None = None  # monotonic seconds; set once it was asked to stop


class RankServer:
    """Serves one worker over `control` until that socket ends."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, Child] = {}
        self.warm = False
        self.closing = False
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Import what ranks need, say "ready", and serve until the worker is gone and every child has ended."""
        procs.name_process("ddptrain-ranks")
        procs.become_subreaper()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up pipe to be written
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._import_torch()
        self._selector.register(self.control, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        while not self.closing or self.children:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj is self.control:
                    self._take_request()
                else:
                    os.read(self._wake_r, 4096)
            self._reap()
            self._kill_overdue()
        procs.kill_descendants()

    def _import_torch(self) -> None:
        try:
            from ddptrain.rank import warmup

            warmup.import_everything()
        except BaseException:
            self._report(report="broken", message=traceback.format_exc())
            raise
        self.warm = procs.thread_count() == 1
        gc.freeze()  # forked ranks then share these pages instead of copying them at their first collection
        self._report(report="ready", pid=os.getpid(), warm=self.warm)

    def _timeout_s(self) -> float | None:
        deadlines = [child.kill_at for child in self.children.values() if child.kill_at is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _report(self, **message: Any) -> None:
        try:
            self.control.send(json.dumps(message).encode())
        except OSError:  # the worker is gone; the selector will say so
            pass

    def _take_request(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE_BYTES, 4)
            for fd in fds:
                os.set_inheritable(fd, False)
        except OSError:
            data, fds = b"", []
        if not data:
            self._close()
            return
        request = json.loads(data)
        try:
            self._serve_request(request, fds)
        except Exception:
            self._report(report="broken", id=request.get("id"), message=traceback.format_exc())
        finally:
            for fd in fds:
                os.close(fd)

    def _serve_request(self, request: Mapping[str, Any], fds: list[int]) -> None:
        if request["op"] == "stop":
            self._stop(request["id"], request["grace_s"])
        elif request["op"] == "store":
            self._fork(request["id"], lambda: _run_store(request["host"], request["port"], fds[0]), keep=fds)
        else:
            self._start_rank(request["id"], *fds)

    def _start_rank(self, rank_id: str, spec_fd: int, log_fd: int, events_fd: int) -> None:
        from ddptrain.rank import process

        spec = process.read_spec(spec_fd)
        if self.warm and not _needs_exec(spec.env):
            self._fork(rank_id, lambda: process.run_rank(spec, log_fd, events_fd), keep=[log_fd, events_fd])
            return
        os.lseek(spec_fd, 0, os.SEEK_SET)
        self._adopt(rank_id, _start_cold(spec.env, spec_fd, log_fd, events_fd))

    def _fork(self, child_id: str, main: Any, keep: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            _become_child(
                main, close=[self.control.fileno(), self._wake_r, self._wake_w, self._selector.fileno()], keep=keep
            )
        self._adopt(child_id, pid)

    def _adopt(self, child_id: str, pid: int) -> None:
        try:
            os.setpgid(pid, pid)  # also done by the child: whoever comes first
        except OSError:
            pass
        self.children[pid] = Child(child_id, pid)
        self._report(report="started", id=child_id, pid=pid)

    def _stop(self, child_id: str, grace_s: float) -> None:
        for child in self.children.values():
            if child.id == child_id:
                kill_at = time.monotonic() + grace_s
                child.kill_at = kill_at if child.kill_at is None else min(child.kill_at, kill_at)
                procs.signal_group(child.pid, signal.SIGTERM)

    def _close(self) -> None:
        """The worker is gone: so are its ranks."""
        self._selector.unregister(self.control)
        self.closing = True
        for child in list(self.children.values()):
            self._stop(child.id, ORPHAN_GRACE_S)

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
            procs.signal_group(pid, signal.SIGKILL)  # what a rank leaves behind ends with it
            code = os.waitstatus_to_exitcode(status)
            self._report(report="exited", id=child.id, pid=pid, status=code, time_ns=time_ns)
            if not self.children:
                procs.kill_descendants()

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self.children.values():
            if child.kill_at is not None and child.kill_at <= now:
                procs.signal_group(child.pid, signal.SIGKILL)
                child.kill_at = now + 1.0


def _needs_exec(env: Mapping[str, str]) -> bool:
    """Whether `env` differs from the server's own where only a fresh program can take it over."""
    names = {name for name in (*env, *os.environ) if name.startswith(EXEC_ONLY_PREFIXES)} - EXEC_ONLY_IGNORED
    return any(env.get(name) != os.environ.get(name) for name in names)


def _start_cold(env: Mapping[str, str], spec_fd: int, log_fd: int, events_fd: int) -> int:
    command = [sys.executable, "-P", "-m", "ddptrain.rank.process", str(spec_fd), str(log_fd), str(events_fd)]
    child = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=(spec_fd, log_fd, events_fd),
        process_group=0,
    )
    child.returncode = 0  # the server reaps every child itself
    return child.pid


def _become_child(main: Any, close: list[int], keep: list[int]) -> NoReturn:
    """In the fresh fork: leave everything of the server behind, run `main`, and never return."""
    code = 70
    try:
        os.setpgid(0, 0)
        procs.die_with_parent()
        signal.set_wakeup_fd(-1)
        gc.enable()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for fd in close:
            if fd not in keep:
                os.close(fd)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_store(host: str, port: int, listen_fd: int) -> int:
    """Host the gang's TCPStore on a listening socket until this process is told to end."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    procs.name_process("ddptrain-store")
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listen_fd))
    signal.pause()
    del store
    return 0


def main() -> None:
    """Entry point of the process: the control socket's number is the one argument."""
    gc.disable()  # collecting while torch is imported takes a fifth of the time and finds nothing
    control = socket.socket(fileno=int(sys.argv[1]))
    RankServer(control).serve()


if __name__ == "__main__":
    main()
