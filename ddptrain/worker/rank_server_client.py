"""The worker's client of its rank server: starts the server, requests ranks, receives reports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import ClusterError
from ddptrain.file_ops import write_all
from ddptrain.protocol import deadlines
from ddptrain.protocol.exec_env import python_command
from ddptrain.protocol.news import describe_status

_LAST_REPORTS_S = 1.0  # time to read the last reports after the server has ended
_MAX_REPORT_BYTES = 64 * 1024


class RankServerLost(ClusterError):
    """The rank server could not start, or has ended."""


@dataclass(slots=True)
class _Child:
    """A rank, or a store.

    woken: set when the rank starts or ends. needed_by: the rank that must be stopped if the store ends; None for a
    rank, "" for a store that is being stopped. how: "forked" or "cold: <reason>". report: of the rank's end.
    """

    woken: threading.Event | None = None
    needed_by: str | None = None
    pid: int | None = None
    how: str = ""
    report: dict[str, Any] | None = None


class RankServerClient:
    """Starts a rank server for this worker. The server and its ranks end with the worker, or when it is closed."""

    def __init__(self, env: Mapping[str, str], log_file: Path, python: str = sys.executable) -> None:
        """Start the server with `env`; it writes to `log_file`, and imports torch while the caller continues.

        python: that of the environment from which the server and its ranks import.
        """
        self.python = python
        self.ready = threading.Event()  # set when the server has imported torch
        self.closed = False
        self.fault: str | None = None  # why the server cannot start ranks any more
        self._log_file = log_file
        self._lock = threading.Lock()
        self._children: dict[str, _Child] = {}  # those that were requested; a rank until its report is taken
        self._control = self._start(env)
        self._reader = threading.Thread(target=self._read_reports, name="ddptrain-rank-server", daemon=True)

    def _start(self, env: Mapping[str, str]) -> socket.socket:
        control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end, self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*python_command("ddptrain.rank.server", self.python), str(server_end.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(server_end.fileno(),),
                start_new_session=True,
            )
        return control

    @property
    def name(self) -> str:
        """The server's name in error messages."""
        return f"the rank server (pid {self._process.pid})"

    @property
    def ranks(self) -> int:
        """The number of ranks that were requested and have not ended."""
        children = list(self._children.values())  # at once: other threads add and remove some
        return sum(child.needed_by is None for child in children)

    def has(self, rank_id: str) -> bool:
        """Return whether the rank was requested and has not ended."""
        return rank_id in self._children

    def start_of(self, rank_id: str) -> tuple[int, str] | None:
        """Return the pid of a rank and how it was started ("forked", "cold: <reason>"); None if it has not started."""
        child = self._children.get(rank_id)
        return None if child is None or child.pid is None else (child.pid, child.how)

    def listen(self) -> None:
        """Start the thread that reads reports. Separate from the constructor, so that Dask can be imported first."""
        self._reader.start()

    def start_rank(
        self, rank_id: str, spec_json: str, log_fd: int, events_fd: int, slot: str, woken: threading.Event | None = None
    ) -> None:
        """Request a rank, which waits for its slot.

        `woken` is set when the rank starts or ends. Raises RankServerLost.
        """
        spec_fd = os.memfd_create("ddptrain-spec")  # a file without a name, because the spec may contain secrets
        try:
            write_all(spec_fd, spec_json.encode())
            with self._lock:
                if self.fault is not None:
                    raise RankServerLost(self.fault)
                self._children[rank_id] = _Child(woken)
            self._send({"op": "fork", "id": rank_id, "slot": slot}, [spec_fd, log_fd, events_fd])
        finally:
            os.close(spec_fd)

    def start_store(self, store_id: str, host: str, listening: socket.socket, rank_id: str = "") -> None:
        """Start a process that hosts a TCPStore; if it dies, stop the rank `rank_id`. Raises RankServerLost."""
        port = listening.getsockname()[1]
        self._children[store_id] = _Child(needed_by=rank_id)
        self._send({"op": "store", "id": store_id, "host": host, "port": port}, [listening.fileno()])

    def stop(self, child_id: str, grace_s: float) -> None:
        """Send SIGTERM to the child's process group, and SIGKILL after `grace_s`. A child that has ended is ignored."""
        child = self._children.get(child_id)
        if child is not None and child.needed_by is not None:
            child.needed_by = ""
        with contextlib.suppress(RankServerLost):
            self._send({"op": "stop", "id": child_id, "grace_s": grace_s})

    def send_command(self, rank_id: str, command: str) -> None:
        """Send a command (see `protocol/commands.py`) to a rank. A rank that has ended is ignored."""
        with contextlib.suppress(RankServerLost):
            self._send({"op": "command", "id": rank_id, "command": command})

    def exit_of(self, rank_id: str) -> dict[str, Any] | None:
        """Return the exit report {"pid", "status", "time_ns"} of a rank, once; None while it runs.

        Raises RankServerLost.
        """
        report = self._children[rank_id].report
        if report is None:
            return None
        del self._children[rank_id]
        if report["report"] != "exited":
            raise RankServerLost(report["message"])
        return report

    def close(self) -> None:
        """End the server. It stops its ranks: SIGTERM, and SIGKILL after 2 s. While it imports torch, it has none."""
        self.closed = True
        if not self.ready.is_set():
            self._process.kill()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)  # exit reports are still received

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`. Return whether the server's process has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])
        except OSError as error:
            if self._reader.is_alive() and threading.current_thread() is not self._reader:
                self._reader.join(_LAST_REPORTS_S)  # the server's last report is the reason
            raise RankServerLost(self.fault or f"{self.name} has ended: {error}") from error

    def _read_reports(self) -> None:
        while data := self._next_report():
            self._handle(json.loads(data))
        self._mark_lost(f"{self.name} was closed" if self.closed else f"{self.name} has ended{self._exit_details()}")
        self._control.close()

    def _next_report(self) -> bytes:
        while True:
            try:
                return self._control.recv(_MAX_REPORT_BYTES)
            except ConnectionResetError:
                continue  # raised once if the server died with an unread request; its last reports are still readable
            except OSError:
                return b""

    def _handle(self, report: dict[str, Any]) -> None:
        child_id, kind = report.get("id", ""), report["report"]
        child = self._children.get(child_id)
        if kind == "ready":
            self.ready.set()
        elif not child_id:
            trace = report["message"].strip()
            last = trace.splitlines()[-1]
            self._mark_lost(f"the rank server ({self.python}) could not start: {last}\n{trace}")
        elif child is None:
            return
        elif kind == "started":
            child.pid, child.how = report["pid"], report["how"]
            _wake(child)
        elif child.needed_by is None:
            child.report = child.report or report  # the loss of the store is why the rank was stopped
            _wake(child)
        else:
            del self._children[child_id]
            if (rank := self._children.get(child.needed_by)) is not None and rank.report is None:
                # Without the store the ranks would wait forever, or report each other as lost.
                why = describe_status(report["status"]) if kind == "exited" else report["message"]
                message = f"the store of the worker group (TCPStore) has ended: {why}"
                rank.report = {"report": "broken", "message": message}
                self.stop(child.needed_by, deadlines.STORE_LOST_GRACE_S)
                _wake(rank)

    def _mark_lost(self, message: str) -> None:
        """Report the loss to all waiting tasks, and kill the ranks, which no server supervises any more."""
        with self._lock:
            self.fault = self.fault or message
            children = list(self._children.values())
        for child in children:
            if child.report is None:
                if child.pid is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, signal.SIGKILL)
                child.report = {"report": "broken", "message": self.fault}
            _wake(child)

    def _exit_details(self) -> str:
        """Return the server's exit status and the end of its log for the error message."""
        status = f" (status {self._process.returncode})" if self.wait(1.0) else ""
        try:
            tail = self._log_file.read_bytes()[-2000:].decode("utf-8", "replace").strip()
        except OSError:
            tail = ""
        return f"{status}: {tail}" if tail else status


def _wake(child: _Child) -> None:
    if child.woken is not None:
        child.woken.set()
