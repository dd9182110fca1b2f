"""How the rank server starts, what it does in each turn, and how its program is called; nothing is imported."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain import log
from ddptrain.errors import UsageError
from ddptrain.rank.server import process_control, warmup
from ddptrain.rank.server import server as rank_server
from ddptrain.rank.server.server import RankServer

READY = {"report": "ready", "pid": os.getpid(), "warm": True}


class Bench:
    """Makes rank servers; `done` has what they do to the process, and in each turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.made: list[RankServer] = []
        self.links: list[socket.socket] = []
        for name in ("name_process", "become_subreaper", "kill_descendants"):
            monkeypatch.setattr(process_control, name, self.note(name))
        monkeypatch.setattr(signal, "signal", lambda number, handler: self.done.append((number, handler(17, None))))
        monkeypatch.setattr(signal, "set_wakeup_fd", self.note("wake-up"))
        for name in ("_import_torch", "_reap", "_kill_overdue", "_start_queued"):
            monkeypatch.setattr(RankServer, name, lambda server, name=name: self.done.append((name,)))

    def note(self, name: str) -> Any:
        return lambda *given, **options: self.done.append((name, *given, *([options] if options else [])))

    def server(self, **parts: Any) -> RankServer:
        made = RankServer(**parts)
        made.why_cold = ""
        self.made.append(made)
        return made

    def worker(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.links += ends
        return ends


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    for server in bench.made:
        server._selector.close()
        os.close(server._wake_r)
        os.close(server._wake_w)
    for link in bench.links:
        link.close()


def reports(link: socket.socket) -> list[dict[str, Any]]:
    found = []
    while data := link.recv(65536):
        found.append(json.loads(data))
    return found


def test_server_serves_its_worker_until_it_is_gone(bench: Bench) -> None:
    worker, control = bench.worker()
    server = bench.server(control=control)
    os.write(server._wake_w, b"x" * 10)
    worker.shutdown(socket.SHUT_WR)
    server.serve()
    assert bench.done == [
        ("name_process", "ddptrain-ranks", "ddptrain rank server"),
        ("become_subreaper",),
        (signal.SIGCHLD, None),
        ("wake-up", server._wake_w, {"warn_on_full_buffer": False}),
        ("_import_torch",),
        *[("_reap",), ("_kill_overdue",), ("_start_queued",)],
        ("kill_descendants",),
    ]
    assert reports(worker) == [READY] and server.connections == []
    with pytest.raises(BlockingIOError):
        os.read(server._wake_r, 1)  # what had woken the server is read


def test_workers_that_connect_later_are_served_and_the_folder_is_removed_after_the_last(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    listener, first, second = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3))
    bench.links += [listener, first, second]
    listener.bind("socket")
    listener.listen()
    listener.setblocking(False)
    first.connect("socket")
    folder = tmp_path / "folder"
    server = bench.server(listener=listener, folder=folder)
    turns: list[int] = []

    def next_turn(_: RankServer) -> None:
        turns.append(len(server.connections))
        assert folder.exists()
        if len(turns) == 1:
            second.connect("socket")
        else:
            first.shutdown(socket.SHUT_WR)
            second.shutdown(socket.SHUT_WR)

    monkeypatch.setattr(RankServer, "_start_queued", next_turn)
    os.write(server._wake_w, b"x")
    server.serve()
    assert turns[:2] == [1, 2] and not folder.exists()
    assert reports(first) == reports(second) == [READY]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of gc.freeze; the import of torch does nothing, and the server has one thread."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("frozen"))
    monkeypatch.setattr(warmup, "import_everything", lambda: calls.append("imported"))
    monkeypatch.setattr(process_control, "thread_count", lambda: 1)
    return calls


@pytest.mark.parametrize(("threads", "why_cold"), [(1, ""), (2, "the rank server has 2 threads")])
def test_server_without_other_threads_forks_ranks(
    monkeypatch: pytest.MonkeyPatch, frozen: list[str], threads: int, why_cold: str
) -> None:
    monkeypatch.setattr(process_control, "thread_count", lambda: threads)
    server = RankServer()
    try:
        assert server.why_cold == "it still imports"
        server._import_torch()
        assert server.why_cold == why_cold and frozen == ["imported", "frozen"]
    finally:
        server._selector.close()
        os.close(server._wake_r)
        os.close(server._wake_w)


def test_workers_are_told_why_the_server_cannot_import_torch_once_none_can_connect(
    monkeypatch: pytest.MonkeyPatch, frozen: list[str]
) -> None:
    def fail() -> None:
        raise ImportError("no libcudart")

    worker, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = RankServer(control=control)
    monkeypatch.setattr(warmup, "import_everything", fail)
    retired = iter([False, True])
    monkeypatch.setattr(server, "_retire", lambda: next(retired))
    try:
        with pytest.raises(ImportError, match="no libcudart"):
            server._import_torch()
        report = json.loads(worker.recv(65536))
        assert report["report"] == "broken" and report["message"].endswith("ImportError: no libcudart\n")
        assert next(retired, None) is None and frozen == []
    finally:
        server._selector.close()
        for fd in (server._wake_r, server._wake_w):
            os.close(fd)
        worker.close()
        control.close()


@pytest.mark.parametrize(("kind", "folder"), [("private", None), ("shared", "/run/x")])
def test_program_serves_the_socket_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, kind: str, folder: str | None
) -> None:
    made: list[Any] = []

    class Server:
        def __init__(self, **parts: Any) -> None:
            made.append(parts)

        def serve(self) -> None:
            made.append("served")

    def refuse() -> None:
        made.append("log")
        raise UsageError("DDPTRAIN_LOG")

    monkeypatch.setattr(rank_server, "RankServer", Server)
    monkeypatch.setattr(gc, "disable", lambda: made.append("no garbage collection"))
    monkeypatch.setattr(log, "to_stderr", refuse)
    one, other = socket.socketpair()
    with one:
        fd = other.detach()
        monkeypatch.setattr(sys, "argv", ["server", kind, str(fd), *([folder] if folder else [])])
        rank_server.main()
        begun, logged, parts, served = made
        assert (begun, logged, served) == ("no garbage collection", "log", "served")
        link = parts["control" if folder is None else "listener"]
        with link:
            assert link.fileno() == fd and link.getblocking() is (folder is None)
        assert parts == ({"control": link} if folder is None else {"listener": link, "folder": Path(folder)})
