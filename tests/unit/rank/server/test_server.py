"""The rank server as a process, controlled by its client; its ranks are stubs."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from ddptrain.worker.rank_server_client import RankServerLost
from tests.unit.worker.stubs import Bench, has_ended, is_gone, status, until

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("under way", flush=True)
time.sleep(600)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pid_of(bench: Bench, rank_id: str) -> int:
    bench.wait_for(rank_id, "\n")
    return int(bench.said(rank_id).split()[0])


def alive(pid: int) -> bool:
    return not has_ended(pid)


def test_rank_runs_to_its_end_and_its_status_is_reported(bench: Bench) -> None:
    with bench.own() as server:
        bench.order(server, "good", "print('done')")
        bench.order(server, "bad", "import os; os._exit(42)")
        bench.order(server, "killed", "import os; os.kill(os.getpid(), 9)")
        assert [status(server, rank) for rank in ("good", "bad", "killed")] == [0, 42, -signal.SIGKILL]
    assert bench.said("good") == "done\n"


def test_stopped_rank_is_killed_after_its_grace_period(bench: Bench) -> None:
    with bench.own() as server:
        bench.order(server, "r", STUBBORN)
        bench.wait_for("r", "under way")
        server.stop("r", 0.2)
        assert status(server, "r") == -signal.SIGKILL


def test_slot_holds_one_rank_at_a_time(bench: Bench) -> None:
    with bench.own() as server:
        bench.order(server, "first", STUBBORN, slot="GPU 0")
        bench.order(server, "second", f"print({str(bench.log('first'))!r})", slot="GPU 0")
        bench.order(server, "elsewhere", "print('at once')", slot="GPU 1")
        assert status(server, "elsewhere") == 0
        assert server.wait_exit("second", 0.3) is None
        assert bench.said("second") == ""
        bench.wait_for("first", "under way")
        server.stop("first", 0.2)
        assert status(server, "first") == -signal.SIGKILL
        assert status(server, "second") == 0


def test_ranks_get_their_slot_in_the_order_of_their_requests(bench: Bench) -> None:
    shared_log = bench.folder / "order"
    with bench.own() as server:
        for number in range(8):
            code = f"import time; open({str(shared_log)!r}, 'a').write('{number}'); time.sleep(0.02)"
            bench.order(server, f"r{number}", code, slot="GPU 0")
        assert [status(server, f"r{number}") for number in range(8)] == [0] * 8
    assert shared_log.read_text() == "01234567"


def test_rank_that_is_stopped_while_it_waits_is_never_started(bench: Bench) -> None:
    with bench.own() as server:
        bench.order(server, "first", STUBBORN, slot="GPU 0")
        bench.order(server, "second", "print('started')", slot="GPU 0")
        bench.wait_for("first", "under way")
        server.stop("second", 30.0)
        assert status(server, "second") == -signal.SIGTERM
        assert bench.said("second") == ""


def test_slot_that_does_not_become_free_is_an_error_that_names_its_holder(tmp_path: Path) -> None:
    bench = Bench(tmp_path, at_import="import ddptrain.rank.server.server as s; s.SLOT_TIMEOUT_S = 0.3")
    with bench.own() as server:
        bench.order(server, "first", STUBBORN, slot="GPU 0")
        bench.wait_for("first", "under way")
        bench.order(server, "second", "print('started')", slot="GPU 0")
        with pytest.raises(RankServerLost, match=r"the slot \(GPU 0\) is still held by first \(pid \d+\)"):
            status(server, "second")


def test_ranks_of_a_connection_end_with_it_and_others_run_on(bench: Bench) -> None:
    with bench.shared() as stays:
        with bench.shared() as goes:
            bench.order(goes, "goes", f"import os; print(os.getpid(), flush=True)\n{STUBBORN}")
            bench.order(stays, "stays", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
            pid = pid_of(bench, "goes")
            bench.wait_for("goes", "under way")
            goes.close()
            assert status(goes, "goes") == -signal.SIGKILL
        assert not alive(pid)
        assert alive(pid_of(bench, "stays"))
        server = psutil.Process(pid_of(bench, "stays")).parent()
    until(lambda: is_gone(server), "the server's end")
    assert not bench.shared_folder.exists()


def test_connections_share_one_process_and_its_slots(bench: Bench) -> None:
    with bench.shared() as one, bench.shared() as two:
        bench.order(one, "one", STUBBORN, slot="GPU 0")
        bench.wait_for("one", "under way")
        bench.order(two, "two", "import os; print(os.getppid())", slot="GPU 0")
        assert two.wait_exit("two", 0.3) is None
        bench.order(one, "parent", "import os; print(os.getppid())")
        assert status(one, "parent") == 0
        one.stop("one", 0.0)
        assert status(two, "two") == 0
    assert bench.said("parent") == bench.said("two")


def test_rank_that_waits_for_its_slot_is_dropped_with_its_connection(bench: Bench) -> None:
    with bench.shared() as stays:
        bench.order(stays, "first", STUBBORN, slot="GPU 0")
        with bench.shared() as goes:
            bench.order(goes, "second", "print('started')", slot="GPU 0")
            bench.wait_for("first", "under way")
        stays.stop("first", 0.0)
        assert status(stays, "first") == -signal.SIGKILL
        bench.order(stays, "third", "print('started')", slot="GPU 0")
        assert status(stays, "third") == 0
    assert bench.said("second") == ""


def test_rank_has_no_open_descriptors_of_the_server(bench: Bench) -> None:
    code = "import os; print([os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2])"
    with bench.shared() as one, bench.shared() as two:
        bench.order(one, "holder", STUBBORN, slot="GPU 0")
        bench.wait_for("holder", "under way")
        bench.order(two, "waiting", "print('started')", slot="GPU 0")
        bench.order(two, "rank", code.replace("if int", "if os.path.exists(f'/proc/self/fd/{fd}') and int"))
        assert status(two, "rank") == 0
    said = bench.said("rank")
    assert "socket" not in said
    assert "eventpoll" not in said
    assert said.count("pipe") == 1  # its own, for commands
    assert "deleted" not in said, "the spec of a rank, which may contain secrets"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system knows no CPU affinity")
def test_rank_gets_the_cores_of_the_worker_that_requested_it(bench: Bench) -> None:
    cores = os.sched_getaffinity(0)
    with bench.own() as server:
        os.sched_setaffinity(0, [min(cores)])
        try:
            bench.order(server, "confined", "import os; print(os.sched_getaffinity(0))")
        finally:
            os.sched_setaffinity(0, cores)
        bench.order(server, "free", "import os; print(os.sched_getaffinity(0))")
        assert (status(server, "confined"), status(server, "free")) == (0, 0)
    assert bench.said("confined") == f"{ {min(cores)} }\n"
    assert bench.said("free") == f"{cores}\n"


def test_server_that_cannot_import_torch_reports_it_to_all_workers(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    held = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    bench = Bench(tmp_path, at_import=f"{held}raise ImportError('libcudart.so: cannot open')")
    with bench.shared() as one, bench.shared() as two:
        for server in (one, two):
            bench.order(server, "r", "pass")
        go_on.touch()
        for server in (one, two):
            with pytest.raises(RankServerLost, match=r"could not start: ImportError: libcudart.so: cannot open"):
                status(server, "r")
            assert "libcudart" in str(server.fault)
            assert not server.ready.is_set()
    until(lambda: not bench.shared_folder.exists(), "the folder's removal")


def test_store_lives_until_it_is_stopped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.own() as server, socket.create_server(("127.0.0.1", 0)) as listening:
        server.start_store("store", "127.0.0.1", listening)
        bench.order(server, "r", "import os; print(os.getppid())")
        assert status(server, "r") == 0
        parent = psutil.Process(int(bench.said("r")))
        until(lambda: len(parent.children()) == 1, "the store's process")
        server.stop("store", 0.0)
        until(lambda: not parent.children(), "the store's end")


def test_rank_is_stopped_when_the_store_of_its_worker_group_dies(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.own() as server, socket.create_server(("127.0.0.1", 0)) as listening:
        server.start_store("store", "127.0.0.1", listening, "r")
        bench.order(server, "r", "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(600)")
        parent = psutil.Process(pid_of(bench, "r"))
        rank = int(bench.said("r").split()[1])
        until(lambda: len(parent.children()) == 2, "the store's process")
        (store,) = [child for child in parent.children() if child.pid != rank]
        store.kill()
        with pytest.raises(
            RankServerLost, match=r"the store of the worker group \(TCPStore\) has ended: killed by SIGKILL"
        ):
            status(server, "r")
        until(lambda: not alive(rank), "the rank's end")
        assert server.fault is None
