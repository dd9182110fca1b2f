"""The worker's end of the rank server: start or join it, order ranks, hear what becomes of them."""

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
from ddptrain.protocol import socket_dir
from ddptrain.protocol.rank_spec import describe_status

_MAX_REPORT_BYTES = 64 * 1024
_WITHOUT_STORE_S = 2.0  # for a rank to end: a checkpoint that is being written is still completed
_DEATH_S = 0.5  # a killed process closes all its sockets within that


class RankServerLost(ClusterError):
    """The rank server could not start, or is gone."""


class RankServer:
    """A connection to a rank server, and the ranks ordered over it; they end when it is closed or the server dies."""

    def __init__(self, control: socket.socket, log_file: Path) -> None:
        self.ready = threading.Event()  # it has imported everything
        self.closed = False
        self._control = control
        self._log_file = log_file
        self._lock = threading.Lock()
        self._inboxes: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pids: dict[str, int] = {}
        self._stores: dict[str, str] = {}  # those that nobody has told to end, and the rank that is lost without it
        self._lost: str | None = None
        self._reader = threading.Thread(target=self._read_reports, name="ddptrain-rank-server", daemon=True)

    @property
    def name(self) -> str:
        """What errors call it."""
        return "the rank server"

    @property
    def fault(self) -> str | None:
        """Why no rank can be started any more; None as long as all is well."""
        return self._lost

    @property
    def ranks(self) -> int:
        """How many ranks were ordered and have not ended."""
        return len(self._inboxes)

    def has(self, rank_id: str) -> bool:
        """Whether the rank was ordered and has not ended."""
        return rank_id in self._inboxes

    def pid_of(self, rank_id: str) -> int | None:
        """The process of a rank that was started and has not ended."""
        return self._pids.get(rank_id)

    def listen(self) -> None:
        """Start to take the server's reports (in a thread; kept apart so that importing Dask comes first)."""
        self._reader.start()

    def start_rank(self, rank_id: str, spec_json: str, log_fd: int, events_fd: int, place: str) -> None:
        """Order a rank, which waits until no other rank is at its place. Raises RankServerLost."""
        with tempfile.TemporaryFile() as file:  # no name: the spec may hold secrets
            file.write(spec_json.encode())
            file.flush()
            request = {"op": "rank", "id": rank_id, "place": place, "cpus": _own_cpus()}
            self._order(request, [file.fileno(), log_fd, events_fd])

    def start_store(self, store_id: str, host: str, listening: socket.socket, rank_id: str = "") -> None:
        """Order a process that hosts a TCPStore on a listening socket; `rank_id` is the rank that is lost without it.

        Raises RankServerLost.
        """
        port = listening.getsockname()[1]
        self._stores[store_id] = rank_id
        self._send({"op": "store", "id": store_id, "host": host, "port": port}, [listening.fileno()])

    def stop(self, child_id: str, grace_s: float) -> None:
        """SIGTERM to the child's process group now, SIGKILL after `grace_s`; nothing happens where it is gone."""
        self._stores.pop(child_id, None)
        try:
            self._send({"op": "stop", "id": child_id, "grace_s": grace_s}, [])
        except RankServerLost:
            pass

    def tell(self, rank_id: str, order: str) -> None:
        """Pass an order on to the rank (see `rank/orders.py`); nothing happens where it is gone."""
        try:
            self._send({"op": "tell", "id": rank_id, "order": order}, [])
        except RankServerLost:
            pass

    def wait_exit(self, rank_id: str, timeout_s: float) -> dict[str, Any] | None:
        """The child's exit report {"pid", "status", "time_ns"}, or None if it has not come in time.

        Raises:
            RankServerLost: the server is gone, or could not start the child.
        """
        try:
            report = self._inboxes[rank_id].get(timeout=timeout_s)
        except queue.Empty:
            return None
        del self._inboxes[rank_id]
        if report["report"] != "exited":
            raise RankServerLost(report["message"])
        return report

    def close(self) -> None:
        """Hang up, which is the order to end every rank of this connection: SIGTERM and, 2 s later, SIGKILL."""
        self.closed = True
        try:
            self._control.shutdown(socket.SHUT_WR)  # reports of the ends still come
        except OSError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """Whether every rank has ended once this is closed, waiting for it at most `timeout_s`."""
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _order(self, request: dict[str, Any], fds: list[int]) -> None:
        with self._lock:
            if self._lost is not None:
                raise RankServerLost(self._lost)
            self._inboxes[request["id"]] = queue.SimpleQueue()
        self._send(request, fds)

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise RankServerLost(self._lost or f"{self.name} is gone: {error}") from error

    def _read_reports(self) -> None:
        while data := self._next_report():
            self._take(json.loads(data))
        self._on_end()
        self._control.close()

    def _next_report(self) -> bytes:
        """Empty at the end."""
        while True:
            try:
                return self._control.recv(_MAX_REPORT_BYTES)
            except ConnectionResetError:
                continue  # it left an order unread, and is told of once; its last reports come after that
            except OSError:
                return b""

    def _on_end(self) -> None:
        """The server has hung up."""
        self._mark_lost(f"{self.name} was closed" if self.closed else f"{self.name} is gone{self._last_words()}")

    def _take(self, report: dict[str, Any]) -> None:
        child_id = report.get("id", "")
        if report["report"] == "ready":
            self.ready.set()
        elif report["report"] == "started":
            self._pids[child_id] = report["pid"]
            return
        elif report["report"] == "exited":
            self._pids.pop(child_id, None)
            if (rank_id := self._stores.pop(child_id, None)) is not None:
                # Its ranks would wait for it for ever, or complain of each other.
                words = f"the process of the gang's store (TCPStore) has ended: {describe_status(report['status'])}"
                child_id, report = rank_id, {"report": "broken", "message": words}
                self.stop(rank_id, _WITHOUT_STORE_S)
        elif not child_id:
            trace = report["message"].strip()
            last = trace.splitlines()[-1]
            self._mark_lost(f"the rank server ({sys.executable}) could not start: {last}\n{trace}")
        if child_id in self._inboxes:
            self._inboxes[child_id].put(report)

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
            tail = self._log_file.read_bytes()[-2000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f": {tail}" if tail else ""


class OwnRankServer(RankServer):
    """The rank server of one worker, which has started it and takes it along when it ends."""

    def __init__(self, env: Mapping[str, str], log_file: Path) -> None:
        """Start the process with `env`; it imports torch while the caller goes on; what it says goes to `log_file`."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log_file.open("ab") as log:
            self._process = _start_process(["private", str(theirs.fileno())], env, theirs.fileno(), log.fileno())
        super().__init__(control, log_file)

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"the rank server (pid {self._process.pid})"

    def close(self) -> None:
        """End the server and every rank. While it still imports it reads no orders and has no ranks: it is killed."""
        if not self.ready.is_set():
            self._process.kill()
        super().close()

    def wait(self, timeout_s: float) -> bool:
        """Whether the server's process has ended, waiting for it at most `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _last_words(self) -> str:
        return f" (status {self._process.returncode})" + super()._last_words() if self.wait(1.0) else ""


class SharedRankServer(RankServer):
    """The rank server that the workers of a host share: it ends, and its folder goes, with its last connection."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        """Connect to the server of `folder`, or start it with `env`. Raises ClusterError where neither can be done."""
        self._folder = folder
        try:
            control = _join(folder, env)
        except OSError as error:
            raise RankServerLost(f"the rank server in {folder} can't be reached: {error}") from error
        super().__init__(control, folder / socket_dir.LOG_FILE)

    def _on_end(self) -> None:
        super()._on_end()
        if not self.closed:
            _sweep(self._folder)


def _join(folder: Path, env: Mapping[str, str]) -> socket.socket:
    with socket_dir.locked(folder) as place:
        if (link := place.connect()) is not None:
            return link
        try:
            return _start_shared(place, env)
        except BaseException:
            place.remove()
            raise


def _start_shared(place: socket_dir.SocketFolder, env: Mapping[str, str]) -> socket.socket:
    with place.listen() as listener, (place.path / socket_dir.LOG_FILE).open("ab") as log:
        link = place.connect()  # before the server runs, for one with no connection ends
        assert link is not None
        words = ["shared", str(listener.fileno()), str(place.path)]
        try:
            process = _start_process(words, env, listener.fileno(), log.fileno())
        except BaseException:
            link.close()
            raise
    # It may outlive this connection, and must not stay as a zombie of this worker.
    threading.Thread(target=process.wait, name="ddptrain-reaper", daemon=True).start()
    return link


def _sweep(folder: Path) -> None:
    """Remove what a server that died has left, unless another one is there already."""
    with socket_dir.locked(folder) as place:
        while (link := place.connect()) is not None:
            with link:
                if _is_served(link):
                    return
        place.remove()


def _is_served(link: socket.socket) -> bool:
    """Whether a live server holds the other end, not one that is just being taken apart by the kernel."""
    link.settimeout(_DEATH_S)
    try:
        return bool(link.recv(_MAX_REPORT_BYTES))
    except TimeoutError:
        return True  # it still imports
    except OSError:
        return False


def _start_process(words: list[str], env: Mapping[str, str], link_fd: int, log_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ddptrain.rank.server.process", *words],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=(link_fd,),
        start_new_session=True,
    )


def _own_cpus() -> list[int] | None:
    """The cores that this worker was given; its ranks get the same, whoever has started the rank server."""
    return sorted(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else None
