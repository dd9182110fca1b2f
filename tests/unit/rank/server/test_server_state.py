"""What the rank server does with requests, children and deadlines; no process is started, and time is set by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.rank.server import server as rank_server
from ddptrain.rank.server.server import Child, Connection, RankServer


class Bench:
    """A rank server with one worker; a second one may connect. `signals` are those that groups of processes got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.signals: list[tuple[int, int]] = []
        self.started: list[dict[str, Any]] = []
        self.exited: list[tuple[int, int]] = []  # (pid, status as of waitpid) that waitpid returns
        self.swept = 0  # how often what was left of all children was killed
        self._links: list[socket.socket] = []
        self._fds: list[int] = []
        self.server = RankServer(control=self._link())
        self.server.why_cold = ""
        self.worker, self.owner = self._links[0], self.server.connections[0]
        clock = SimpleNamespace(monotonic=lambda: self.now, time_ns=lambda: 77)
        monkeypatch.setattr(rank_server, "time", clock)
        monkeypatch.setattr("ddptrain.rank.server.server.children.start_rank", self._start_rank)
        monkeypatch.setattr("ddptrain.rank.server.server.children.start_store", self._start_store)
        monkeypatch.setattr(
            "ddptrain.rank.server.server.process_control.signal_group", lambda *sent: self.signals.append(sent)
        )
        monkeypatch.setattr("ddptrain.rank.server.server.process_control.kill_descendants", self._sweep)
        monkeypatch.setattr(os, "waitpid", self._waitpid)

    def _link(self) -> socket.socket:
        worker, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker.setblocking(False)
        self._links += [worker, link]
        return link

    def second_worker(self) -> tuple[socket.socket, Connection]:
        self.server.connections.append(Connection(self._link()))
        return self._links[-2], self.server.connections[-1]

    def _start_rank(self, *fds: int, why_cold: str, close: list[int]) -> tuple[int, str]:
        self.started.append({"fds": fds, "close": close, "why_cold": why_cold})
        if why_cold == "fails":
            raise RuntimeError("no memory")
        return 1000 + len(self.started), "cold: why" if why_cold else "forked"

    def _start_store(self, *arguments: Any, close: list[int]) -> int:
        self.started.append({"store": arguments, "close": close})
        return 2000

    def _sweep(self) -> None:
        self.swept += 1

    def _waitpid(self, pid: int, options: int) -> tuple[int, int]:
        assert (pid, options) == (-1, os.WNOHANG)
        if not self.exited:
            raise ChildProcessError
        return self.exited.pop(0)

    def fds(self, count: int = 3) -> list[int]:
        """Descriptors of a rank."""
        self._fds += [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
        return self._fds[-count:]

    def ask(self, worker: socket.socket | None = None, fds: Sequence[int] = (), **request: Any) -> None:
        """Have the server handle one request."""
        link = worker or self.worker
        connection = self.server.connections[0 if link is self.worker else 1]
        socket.send_fds(link, [json.dumps(request).encode()], list(fds))
        self.server._handle_request(connection)

    def order(self, name: str, slot: str = "GPU 0", worker: socket.socket | None = None, **more: Any) -> None:
        self.ask(worker, self.fds(), op="rank", id=name, slot=slot, **{"cpus": None, **more})

    def reports(self, worker: socket.socket | None = None) -> list[dict[str, Any]]:
        found = []
        while True:
            try:
                found.append(json.loads((worker or self.worker).recv(65536)))
            except BlockingIOError:
                return found

    def close(self) -> None:
        for queued in [*self.server.queue]:
            self.server._dequeue(queued)
        for child in self.server.children.values():
            if child.commands_fd is not None:
                os.close(child.commands_fd)
        self.server._selector.close()
        for fd in (*self._fds, self.server._wake_r, self.server._wake_w):
            os.close(fd)
        for link in self._links:
            link.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_rank_is_started_with_its_descriptors_and_a_pipe_for_commands(bench: Bench) -> None:
    bench.order("r")
    spec, log, events = bench.server.queue[0].fds
    assert not os.get_inheritable(spec)
    bench.server._start_queued()
    (begun,) = bench.started
    assert begun["fds"][:3] == (spec, log, events) and begun["why_cold"] == ""
    (child,) = bench.server.children.values()
    assert (child.id, child.pid, child.slot, child.how, child.kill_at) == ("r", 1001, "GPU 0", "forked", None)
    assert child.commands_fd is not None and not os.get_blocking(child.commands_fd)
    own = {bench.owner.socket.fileno(), bench.server._selector.fileno(), bench.server._wake_r, bench.server._wake_w}
    assert {*begun["close"]} == own | {spec, log, events, child.commands_fd}
    assert bench.server.queue == [] and not any(map(is_open, [spec, log, events, begun["fds"][3]]))
    assert bench.reports() == [{"report": "started", "id": "r", "pid": 1001, "how": "forked"}]


def test_forked_child_closes_what_belongs_to_others(bench: Bench) -> None:
    bench.second_worker()
    bench.server.listener = bench._links[-2]
    bench.order("first", "a")
    bench.server._start_queued()
    bench.order("second", "b")
    bench.order("third", "b")
    queued = [fd for each in bench.server.queue for fd in each.fds]
    (child,) = bench.server.children.values()
    links = [link.socket.fileno() for link in bench.server.connections]
    assert child.commands_fd is not None
    pipes = [bench.server._wake_r, bench.server._wake_w, child.commands_fd]
    expected = [*links, bench.server.listener.fileno(), bench.server._selector.fileno(), *queued, *pipes]
    assert sorted(bench.server._fds_to_close()) == sorted(expected) and len(queued) == 6


def test_rank_waits_for_its_slot_60_seconds(bench: Bench) -> None:
    bench.order("first")
    bench.server._start_queued()
    bench.order("second")
    bench.order("other", "GPU 1")
    bench.reports()
    bench.server._start_queued()
    assert [child.id for child in bench.server.children.values()] == ["first", "other"]
    assert bench.server._timeout_s() == 60.0
    bench.now = 159.9
    bench.server._start_queued()
    assert [queued.id for queued in bench.server.queue] == ["second"]
    bench.now = 160.0
    bench.server._start_queued()
    message = "the slot (GPU 0) is still held by first (pid 1001), which has not ended within 60 s"
    assert bench.reports()[-1] == {"report": "broken", "id": "second", "message": message} and bench.server.queue == []


def test_rank_gets_the_slot_of_a_rank_that_has_exited(bench: Bench) -> None:
    for name in ("first", "second"):
        bench.order(name)
    bench.server._start_queued()
    assert list(bench.server.children) == [1001]
    bench.exited = [(1001, 0)]
    bench.server._reap()
    bench.server._start_queued()
    assert [child.id for child in bench.server.children.values()] == ["second"]


def test_rank_that_cant_start_is_reported_and_its_descriptors_are_closed(bench: Bench) -> None:
    bench.server.why_cold = "fails"
    before = len(os.listdir("/proc/self/fd"))
    bench.order("r")
    bench.server._start_queued()
    (report,) = bench.reports()
    assert (report["report"], report["id"]) == ("broken", "r") and "RuntimeError: no memory" in report["message"]
    assert bench.server.children == {} and len(os.listdir("/proc/self/fd")) == before + 3  # those of the test


def test_rank_gets_its_cores(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: set_to.append(given))
    bench.order("r", cpus=[2, 3])
    bench.server._start_queued()
    bench.order("s", "GPU 1")
    bench.server._start_queued()
    assert set_to == [(0, [2, 3])] and len(bench.server.children) == 2


def test_store_is_a_child_without_a_slot(bench: Bench) -> None:
    bench.ask(fds=bench.fds(1), op="store", id="s", host="10.0.0.1", port=4000)
    (begun,) = bench.started
    assert begun["store"][:2] == ("10.0.0.1", 4000) and not is_open(begun["store"][2])
    child = bench.server.children[2000]
    assert (child.slot, child.commands_fd, child.how) == ("", None, "forked")
    assert bench.reports() == [{"report": "started", "id": "s", "pid": 2000, "how": "forked"}]
    bench.ask(op="command", id="s", command="stacks")  # it reads no commands


def test_bad_request_is_answered_and_its_descriptors_are_closed(bench: Bench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bench.ask(fds=bench.fds(1), op="rank", id="r")
    (report,) = bench.reports()
    assert (report["report"], report["id"]) == ("broken", "r") and "KeyError: 'slot'" in report["message"]
    assert len(os.listdir("/proc/self/fd")) == before + 1  # that of the test


# --- stop ---


def test_stopped_rank_gets_the_command_and_sigterm_and_keeps_the_shortest_grace(bench: Bench) -> None:
    bench.order("r")
    bench.server._start_queued()
    bench.ask(op="stop", id="r", grace_s=10.0)
    child = bench.server.children[1001]
    assert child.kill_at == 110.0 and bench.signals == [(1001, signal.SIGTERM)]
    bench.now = 101.0
    bench.ask(op="stop", id="r", grace_s=20.0)
    assert child.kill_at == 110.0
    bench.ask(op="stop", id="r", grace_s=2.0)
    assert child.kill_at == 103.0 and bench.server._timeout_s() == 2.0
    bench.server._kill_overdue()
    assert len(bench.signals) == 3
    bench.now = 103.0
    bench.server._kill_overdue()
    assert bench.signals[3:] == [(1001, signal.SIGKILL)] and child.kill_at == 104.0
    bench.now = 105.5
    assert bench.server._timeout_s() == 0.0


def test_rank_reads_its_commands_line_by_line(bench: Bench) -> None:
    read_end, write_end = os.pipe()
    bench.server.children[5] = Child("r", 5, "GPU 0", bench.owner, commands_fd=write_end)
    bench.ask(op="command", id="r", command="stacks")
    bench.ask(op="command", id="other", command="preempt")
    bench.ask(op="stop", id="r", grace_s=1.0)
    assert os.read(read_end, 100) == b"stacks\nstop\n"
    os.close(read_end)
    bench.ask(op="command", id="r", command="stacks")  # nobody reads any more
    assert bench.reports() == []


def test_rank_that_is_stopped_before_its_start_counts_as_ended_by_sigterm(bench: Bench) -> None:
    bench.order("r")
    bench.order("s")
    bench.ask(op="stop", id="r", grace_s=1.0)
    assert bench.reports() == [{"report": "exited", "id": "r", "pid": 0, "status": -15, "time_ns": 77}]
    assert [queued.id for queued in bench.server.queue] == ["s"] and bench.signals == []


def test_worker_stops_its_own_ranks_alone(bench: Bench) -> None:
    worker, _ = bench.second_worker()
    bench.order("r", "a")
    bench.order("r", "b", worker)
    bench.server._start_queued()
    bench.ask(worker, op="stop", id="r", grace_s=1.0)
    assert bench.signals == [(1002, signal.SIGTERM)] and bench.server.children[1001].kill_at is None


def test_ranks_of_a_worker_that_is_gone_are_stopped_in_two_seconds(bench: Bench) -> None:
    worker, second = bench.second_worker()
    bench.server._greet(bench.server.connections)
    for name, link in (("a", None), ("b", worker)):
        bench.order(f"{name}1", name, link)
        bench.order(f"{name}2", name, link)
    bench.server._start_queued()
    worker.close()
    bench.server._handle_request(second)
    assert second.closing and not bench.owner.closing
    assert bench.signals == [(1002, signal.SIGTERM)] and bench.server.children[1002].kill_at == 102.0
    assert [queued.id for queued in bench.server.queue] == ["a2"]
    assert not bench.server._is_over() and second in bench.server.connections, "its rank still runs"
    bench.exited = [(1002, 9), (0, 0)]
    bench.server._reap()
    assert not bench.server._is_over() and bench.server.connections == [bench.owner]
    assert second.socket.fileno() == -1


def test_server_is_over_after_its_last_worker_and_child(bench: Bench) -> None:
    bench.server._greet(bench.server.connections)
    bench.order("r")
    bench.server._start_queued()
    assert not bench.server._is_over()
    bench.worker.close()
    bench.server._handle_request(bench.owner)
    assert not bench.server._is_over()
    bench.exited = [(1001, 15)]
    bench.server._reap()
    assert bench.server._is_over() and bench.server.connections == []


def test_shared_folder_is_removed_before_the_server_ends_unless_a_worker_has_just_connected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "socket"
    bench.server.folder = folder
    answers = iter([True, False])
    monkeypatch.setattr(bench.server, "_accept", lambda: next(answers))
    bench.server.connections.clear()
    assert not bench.server._is_over() and folder.exists()
    assert bench.server._is_over() and not folder.exists()


# --- ends of children ---


@pytest.mark.parametrize(("status", "code"), [(0, 0), (42 << 8, 42), (9, -9)])
def test_end_of_a_child_is_reported_and_its_group_is_killed(bench: Bench, status: int, code: int) -> None:
    for name, slot in (("r", "a"), ("s", "b")):
        bench.order(name, slot)
    bench.server._start_queued()
    bench.reports()
    pipe = bench.server.children[1001].commands_fd
    bench.exited = [(4711, 0), (1001, status), (0, 0), (1002, 0)]
    bench.server._reap()
    assert bench.reports() == [{"report": "exited", "id": "r", "pid": 1001, "status": code, "time_ns": 77}]
    assert bench.signals == [(1001, signal.SIGKILL)] and bench.swept == 0
    assert pipe is not None and not is_open(pipe)
    bench.server._reap()
    assert bench.server.children == {} and bench.swept == 1


def test_deadline_is_the_next_of_children_and_queue(bench: Bench) -> None:
    assert bench.server._timeout_s() is None
    bench.server.children[5] = Child("r", 5, "a", bench.owner)
    assert bench.server._timeout_s() is None
    bench.server.children[5].kill_at = 130.0
    bench.order("s", "a")
    assert bench.server._timeout_s() == 30.0
    bench.server.children[5].kill_at = None
    assert bench.server._timeout_s() == 60.0


# --- connections ---


@pytest.mark.parametrize(("why_cold", "warm"), [("", True), ("2 threads", False)])
def test_workers_that_connect_are_greeted_once_the_server_serves(bench: Bench, why_cold: str, warm: bool) -> None:
    waiting: list[Any] = []

    class Listener:
        def accept(self) -> tuple[socket.socket, str]:
            if not waiting:
                raise BlockingIOError
            return waiting.pop(0), ""

    bench.server.why_cold = why_cold
    bench.server.listener = Listener()  # type: ignore[assignment]
    assert not bench.server._accept()
    first, second, third = (bench._link() for _ in range(3))
    first.setblocking(False)
    waiting += [first, second]
    assert bench.server._accept() and len(bench.server.connections) == 3 and first.getblocking()
    assert bench._links[2].fileno() >= 0 and bench.reports(bench._links[2]) == [], "it still imports"
    bench.server.serving = True
    waiting.append(third)
    bench.server._accept()
    ready = {"report": "ready", "pid": os.getpid(), "warm": warm}
    assert bench.reports(bench._links[6]) == [ready] and bench.reports(bench._links[2]) == []


def test_worker_that_does_not_read_is_hung_up(bench: Bench) -> None:
    for _ in range(1000):
        bench.owner.report(report="x", text="y" * 10_000)
    assert bench.owner.receive() == (None, [])
    bench.owner.report(report="x")  # a worker that is gone is no error


def test_connection_that_fails_is_at_its_end(bench: Bench) -> None:
    bench.owner.socket.setblocking(False)
    assert bench.owner.receive() == (None, [])
