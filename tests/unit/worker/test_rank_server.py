"""The rank server as a process, and its client in the worker; its ranks are stubs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddptrain.worker.rank_server_client import RankServerLost
from tests.support.command import wait_until
from tests.unit.worker.stubs import Bench, has_ended, status

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
    with bench.server() as server:
        bench.order(server, "good", "print('done')")
        bench.order(server, "bad", "import os; os._exit(42)")
        bench.order(server, "killed", "import os; os.kill(os.getpid(), 9)")
        assert [status(server, rank) for rank in ("good", "bad", "killed")] == [0, 42, -signal.SIGKILL]
    assert bench.said("good") == "done\n"


def test_slot_holds_one_rank_at_a_time(bench: Bench) -> None:
    with bench.server() as server:
        bench.order(server, "first", STUBBORN, slot="GPU 0")
        bench.order(server, "second", f"print({str(bench.log('first'))!r})", slot="GPU 0")
        bench.order(server, "elsewhere", "print('at once')", slot="GPU 1")
        assert status(server, "elsewhere") == 0
        time.sleep(0.3)
        assert server.exit_of("second") is None
        assert bench.said("second") == ""
        bench.wait_for("first", "under way")
        server.stop("first", 0.2)
        assert status(server, "first") == -signal.SIGKILL
        assert status(server, "second") == 0


def test_ranks_get_their_slot_in_the_order_of_their_requests(bench: Bench) -> None:
    shared_log = bench.folder / "order"
    with bench.server() as server:
        for number in range(8):
            code = f"import time; open({str(shared_log)!r}, 'a').write('{number}'); time.sleep(0.02)"
            bench.order(server, f"r{number}", code, slot="GPU 0")
        assert [status(server, f"r{number}") for number in range(8)] == [0] * 8
    assert shared_log.read_text() == "01234567"


def test_rank_that_is_stopped_while_it_waits_is_never_started(bench: Bench) -> None:
    with bench.server() as server:
        bench.order(server, "first", STUBBORN, slot="GPU 0")
        bench.order(server, "second", "print('started')", slot="GPU 0")
        bench.wait_for("first", "under way")
        server.stop("second", 30.0)
        assert status(server, "second") == -signal.SIGTERM
        assert bench.said("second") == ""


def test_slot_that_does_not_become_free_is_an_error_that_names_its_holder(tmp_path: Path) -> None:
    bench = Bench(tmp_path, at_import="import ddptrain.rank.server as s; s.SLOT_TIMEOUT_S = 0.3")
    with bench.server() as server:
        bench.order(server, "first", STUBBORN, slot="GPU 0")
        bench.wait_for("first", "under way")
        bench.order(server, "second", "print('started')", slot="GPU 0")
        with pytest.raises(RankServerLost, match=r"the slot \(GPU 0\) is still held by first \(pid \d+\)"):
            status(server, "second")


def test_store_lives_until_it_is_stopped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.server() as server, socket.create_server(("127.0.0.1", 0)) as listening:
        server.start_store("store", "127.0.0.1", listening)
        bench.order(server, "r", "import os; print(os.getppid())")
        assert status(server, "r") == 0
        parent = psutil.Process(int(bench.said("r")))
        wait_until(lambda: len(parent.children()) == 1, "the store's process")
        server.stop("store", 0.0)
        wait_until(lambda: not parent.children(), "the store's end")


def test_rank_is_stopped_when_the_store_of_its_worker_group_dies(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.server() as server, socket.create_server(("127.0.0.1", 0)) as listening:
        server.start_store("store", "127.0.0.1", listening, "r")
        bench.order(server, "r", "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(600)")
        parent = psutil.Process(pid_of(bench, "r"))
        rank = int(bench.said("r").split()[1])
        wait_until(lambda: len(parent.children()) == 2, "the store's process")
        (store,) = [child for child in parent.children() if child.pid != rank]
        store.kill()
        with pytest.raises(
            RankServerLost, match=r"the store of the worker group \(TCPStore\) has ended: killed by SIGKILL"
        ):
            status(server, "r")
        wait_until(lambda: not alive(rank), "the rank's end")
        assert server.fault is None


def test_rank_has_no_open_descriptors_of_the_server(bench: Bench) -> None:
    code = """
import os
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
print([os.readlink(link) for link in links if os.path.exists(link)])
"""
    with bench.server() as server:
        bench.order(server, "holder", STUBBORN, slot="GPU 0")
        bench.wait_for("holder", "under way")
        bench.order(server, "waiting", "print('started')", slot="GPU 0")
        bench.order(server, "rank", code)
        assert status(server, "rank") == 0
    said = bench.said("rank")
    assert "socket" not in said
    assert "eventpoll" not in said
    assert said.count("pipe") == 1  # its own, for commands
    assert "deleted" not in said, "the spec of a rank, which may contain secrets"


def test_rank_that_cannot_start_does_not_end_the_others(bench: Bench) -> None:
    with bench.server() as server:
        bench.order(server, "stays", STUBBORN)
        bench.wait_for("stays", "under way")
        with (bench.folder / "log").open("w") as log:
            server.start_rank("bad", "{}", log.fileno(), log.fileno(), "GPU 1")
        with pytest.raises(RankServerLost, match="can't read the spec"):
            status(server, "bad")
        bench.order(server, "later", "print('done')")
        assert status(server, "later") == 0
        assert server.exit_of("stays") is None


@pytest.mark.parametrize("session", [False, True])
def test_what_a_rank_has_started_ends_with_it(bench: Bench, session: bool) -> None:
    code = f"""
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session={session}).pid, flush=True)
"""
    with bench.server() as server:
        bench.order(server, "r", code)
        assert status(server, "r") == 0
        child = int(bench.said("r"))
        wait_until(lambda: has_ended(child), "the end of the rank's child")


def test_server_that_cannot_import_torch_says_why(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    held = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    bench = Bench(tmp_path, at_import=f"{held}raise ImportError('libcudart.so: cannot open')")
    with bench.server() as server:
        bench.order(server, "r", "pass")
        go_on.touch()
        with pytest.raises(RankServerLost, match=r"could not start: ImportError: libcudart.so: cannot open"):
            status(server, "r")
        assert "libcudart" in str(server.fault)
        assert not server.ready.is_set()


def test_lost_server_is_an_error_with_its_status(bench: Bench) -> None:
    with bench.server() as server:
        bench.order(server, "r", "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(600)")
        bench.wait_for("r", "\n")
        killed, rank = map(int, bench.said("r").split())
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(RankServerLost, match=r"the rank server \(pid \d+\) has ended \(status -9\)"):
            status(server, "r")
        with pytest.raises(RankServerLost, match="has ended"):
            bench.order(server, "another", "pass")
        wait_until(lambda: has_ended(rank), "the rank's end")


def test_server_that_still_imports_ends_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, at_import="import time; time.sleep(600)")
    began = time.monotonic()
    with bench.server():
        pass
    assert time.monotonic() - began < 60.0


def test_server_and_ranks_end_with_a_killed_worker(bench: Bench) -> None:
    code = """
import os, sys
from pathlib import Path
from tests.unit.worker.stubs import Bench
bench = Bench(Path(sys.argv[1]))
with bench.server() as server:
    bench.order(server, "r", "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)")
    bench.wait_for("r", chr(10))
    os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code, str(bench.folder)], env=bench.env, cwd=root, timeout=60)
    for pid in map(int, bench.said("r").split()):
        wait_until(lambda pid=pid: has_ended(pid), f"the end of process {pid}")  # type: ignore[misc]
