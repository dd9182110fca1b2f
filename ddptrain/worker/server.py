"""The worker's end of the rank server: start it, order ranks, hear what becomes of them."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.errors import ClusterError

_MAX_REPORT_BYTES = 64 * 1024


class RankServerLost(ClusterError):
    """The rank server could not start, or is gone."""


class RankServer:
    """A rank server process and the ranks that it runs; all end when this object is closed or its process dies."""

    def __init__(self, env: Mapping[str, str], log_file: Path) -> None:
        """Start the process with `env`; it imports torch while the caller goes on; what it says goes to `log_file`."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ddptrain.rank.server", str(theirs.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._log_file = log_file
        self._lock = threading.Lock()
        self._inboxes: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pids: dict[str, int] = {}
        self._lost: str | None = None
        self.ready = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def listen(self) -> None:
        """Start to take the server's reports (in a thread; kept apart so that importing Dask comes first)."""
        self._reader = threading.Thread(target=self._read_reports, name="ddptrain-rank-server", daemon=True)
        self._reader.start()

    def start_rank(self, rank_id: str, spec_json: str, log_fd: int, events_fd: int) -> None:
        """Order a rank. Raises RankServerLost where the server is gone."""
        with tempfile.TemporaryFile() as file:  # no name: the spec may hold secrets
            file.write(spec_json.encode())
            file.flush()
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            self._order({"op": "rank", "id": rank_id}, [file.fileno(), log_fd, events_fd])

    def start_store(self, store_id: str, host: str, listening: socket.socket) -> None:
        """Order a process that hosts a TCPStore on a listening socket."""
        port = listening.getsockname()[1]
        self._send({"op": "store", "id": store_id, "host": host, "port": port}, [listening.fileno()])

    def stop(self, child_id: str, grace_s: float) -> None:
        """SIGTERM to the child's process group now, SIGKILL after `grace_s`; nothing happens where it is gone."""
        try:
            self._send({"op": "stop", "id": child_id, "grace_s": grace_s}, [])
        except RankServerLost:
            pass

    def wait_exit(self, rank_id: str, timeout_s: float) -> dict[str, Any] | None:
        """The child's exit report {"pid", "status", "time_ns"}, or None if it has not come in time.

        Raises:
            RankServerLost: the server is gone, or could not start the child.
        """
        inbox = self._inboxes[rank_id]
        try:
            report = inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if report["report"] == "started":
            self._pids[rank_id] = report["pid"]
            return None
        if report["report"] == "exited":
            self._forget(rank_id)
            return report
        self._forget(rank_id)
        raise RankServerLost(report["message"])

    def close(self) -> None:
        """End the server and every rank: the end of the socket is the order to do so.

        While it is still importing it reads no orders, and has no ranks: then it is killed.
        """
        if not self.ready.is_set():
            self._process.kill()
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """Whether the server's process has ended, waiting for it at most `timeout_s`."""
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _order(self, message: dict[str, Any], fds: list[int]) -> None:
        with self._lock:
            if self._lost is not None:
                raise RankServerLost(self._lost)
            self._inboxes[message["id"]] = queue.SimpleQueue()
        self._send(message, fds)

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise RankServerLost(self._lost or f"the rank server (pid {self.pid}) is gone: {error}") from error

    def _forget(self, child_id: str) -> None:
        self._inboxes.pop(child_id, None)
        self._pids.pop(child_id, None)

    def _read_reports(self) -> None:
        while True:
            try:
                data = self._control.recv(_MAX_REPORT_BYTES)
            except OSError:
                data = b""
            if not data:
                break
            self._take(json.loads(data))
        self._mark_lost(f"the rank server (pid {self.pid}) is gone{self._last_words()}")

    def _take(self, report: dict[str, Any]) -> None:
        inbox = self._inboxes.get(report.get("id", ""))
        if report["report"] == "ready":
            self.ready.set()
        elif inbox is not None:
            inbox.put(report)
        elif report["report"] == "broken":
            trace = report["message"].strip()
            last = trace.splitlines()[-1]
            self._mark_lost(f"the rank server ({sys.executable}) could not start: {last}\n{trace}")

    def _mark_lost(self, message: str) -> None:
        """Tell everyone who waits, and end the ranks' groups, which nobody watches any more."""
        with self._lock:
            self._lost = self._lost or message
            waiting = list(self._inboxes.values())
        for pid in list(self._pids.values()):
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        for inbox in waiting:
            inbox.put({"report": "broken", "message": self._lost})

    def _last_words(self) -> str:
        try:
            status = self._process.wait(timeout=1.0)
            tail = self._log_file.read_bytes()[-2000:].decode("utf-8", "replace").strip()
        except (subprocess.TimeoutExpired, OSError):
            return ""
        return f" (status {status})" + (f": {tail}" if tail else "")
