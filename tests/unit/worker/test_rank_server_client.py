"""The client of the rank server: of a private one, or of one that the workers of a host share."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddptrain.errors import ClusterError
from ddptrain.worker.rank_server_client import (
    OwnRankServerClient,
    RankServerClient,
    RankServerLost,
    SharedRankServerClient,
)
from tests.unit.worker.stubs import Bench, is_gone, listening, status, until

PARENT = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def server_of(bench: Bench, rank_id: str) -> psutil.Process:
    bench.wait_for(rank_id, "\n")
    return psutil.Process(int(bench.said(rank_id)))


def test_lost_server_is_an_error_with_the_end_of_its_log(bench: Bench) -> None:
    with bench.own() as server:
        bench.order(server, "r", PARENT)
        server_of(bench, "r").kill()
        with pytest.raises(RankServerLost, match=r"the rank server \(pid \d+\) has ended \(status -9\)"):
            status(server, "r")
        with pytest.raises(RankServerLost, match="has ended"):
            bench.order(server, "another", "pass")


def test_own_server_that_still_imports_ends_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, at_import="import time; time.sleep(600)")
    began = time.monotonic()
    with bench.own():
        pass
    assert time.monotonic() - began < 60.0


def test_shared_server_outlives_the_worker_that_started_it(bench: Bench) -> None:
    """The worker is killed, as by the kernel or by its nanny."""
    code = """
import os, sys, time
from pathlib import Path
from ddptrain.worker.rank_server_client import SharedRankServerClient
server = SharedRankServerClient(Path(sys.argv[1]), dict(os.environ))
server.listen()
server.ready.wait(60)
print("joined", flush=True)
time.sleep(600)
"""
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(bench.shared_folder)], env=bench.env, stdout=subprocess.PIPE
    )
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"joined\n"
        with bench.shared() as server:
            bench.order(server, "r", PARENT)
            process = server_of(bench, "r")
            first.kill()
            first.wait()
            bench.order(server, "after", "print('still here')")
            assert status(server, "after") == 0
            assert server.wait_exit("r", 0.3) is None
            assert process.is_running()
    until(lambda: is_gone(process), "the server's end")
    assert not bench.shared_folder.exists()


def test_ranks_end_with_a_killed_worker(bench: Bench) -> None:
    code = """
import os, sys
from pathlib import Path
from tests.unit.worker.stubs import Bench
from ddptrain.worker.rank_server_client import SharedRankServerClient
bench = Bench(Path(sys.argv[1]))
server = SharedRankServerClient(bench.shared_folder, bench.env)
server.listen()
bench.order(server, "r", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
bench.wait_for("r", chr(10))
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parents[3]
    with bench.shared() as stays:
        assert stays.ready.wait(60)
        subprocess.run([sys.executable, "-c", code, str(bench.folder)], env=bench.env, cwd=root, timeout=60)
        rank = int(bench.said("r"))
        until(lambda: not psutil.pid_exists(rank), "the rank's end")


def test_killed_shared_server_is_replaced_and_leaves_no_folder(bench: Bench) -> None:
    with bench.shared() as server:
        bench.order(server, "r", PARENT)
        server_of(bench, "r").kill()
        with pytest.raises(RankServerLost, match="the rank server has ended"):
            status(server, "r")
        until(lambda: not bench.shared_folder.exists(), "the folder's removal")
        with bench.shared() as another:
            bench.order(another, "again", "print('fresh')")
            assert status(another, "again") == 0
    assert not bench.shared_folder.exists()


def test_ended_shared_server_is_reaped_by_the_worker_that_started_it(bench: Bench) -> None:
    with bench.shared() as server:
        bench.order(server, "r", PARENT)
        process = server_of(bench, "r")
    until(lambda: not process.is_running(), "the server's end, reaped")


def test_workers_that_come_and_go_always_find_a_server(bench: Bench) -> None:
    """The last worker leaves at the moment when the next one connects, many times."""
    failures: list[str] = []

    def come_and_go(name: int) -> None:
        for turn in range(12):
            try:
                with bench.shared() as server:
                    bench.order(server, f"{name}-{turn}", "pass")
                    assert status(server, f"{name}-{turn}") == 0
            except Exception as error:
                failures.append(f"{name}-{turn}: {error!r}")

    threads = [threading.Thread(target=come_and_go, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    until(lambda: not bench.shared_folder.exists(), "the folder's removal")


def test_folder_that_others_can_enter_is_refused(bench: Bench) -> None:
    bench.shared_folder.mkdir()
    bench.shared_folder.chmod(0o755)
    with pytest.raises(ClusterError, match=r"with mode 0755, but it must belong to user .* with mode 0700"):
        SharedRankServerClient(bench.shared_folder, bench.env)
    assert bench.shared_folder.exists()


def test_folder_that_is_a_link_is_refused(bench: Bench) -> None:
    (bench.folder / "elsewhere").mkdir(mode=0o700)
    bench.shared_folder.symlink_to(bench.folder / "elsewhere")
    with pytest.raises(ClusterError, match="is not a usable folder"):
        SharedRankServerClient(bench.shared_folder, bench.env)


def test_folder_may_have_a_long_path(bench: Bench) -> None:
    deep = bench.folder / ("d" * 120)
    deep.mkdir()
    with (
        listening(SharedRankServerClient(deep / "shared", bench.env)) as one,
        listening(SharedRankServerClient(deep / "shared", bench.env)) as two,
    ):
        for server in (one, two):
            bench.order(server, "r", "import os; print(os.getppid())")
            assert status(server, "r") == 0
    assert len(set(bench.said("r").split())) == 1


def test_server_that_cannot_be_started_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(RankServerLost, match=r"can't be started or reached: .*No such file"):
        SharedRankServerClient(bench.shared_folder, bench.env)
    assert not bench.shared_folder.exists()


def test_closed_server_takes_no_more_orders(bench: Bench) -> None:
    server = OwnRankServerClient(bench.env, bench.folder / "own.log")
    with listening(server):
        assert server.ready.wait(60)
    until(lambda: server.fault is not None, "the end of the connection")
    with pytest.raises(RankServerLost, match="was closed"):
        bench.order(server, "r", "pass")


def test_what_a_rank_has_started_ends_with_it(bench: Bench) -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
"""
    with bench.own() as server:
        bench.order(server, "r", code)
        assert status(server, "r") == 0
        child = int(bench.said("r"))
        until(lambda: not psutil.pid_exists(child), "the end of the rank's child")


def test_request_to_a_server_that_has_ended_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may fail before the reason was read."""
    control, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = RankServerClient(control, tmp_path / "log")
    may_read = threading.Event()
    read = client._next_report
    monkeypatch.setattr(client, "_next_report", lambda: read() if may_read.wait(60) else b"")
    server.send(json.dumps({"report": "failed", "message": "Traceback\nImportError: no libcudart"}).encode())
    server.close()
    client.listen()
    threading.Timer(0.2, may_read.set).start()
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        pytest.raises(RankServerLost, match="could not start: ImportError: no libcudart"),
    ):
        client.start_store("s", "127.0.0.1", port)
