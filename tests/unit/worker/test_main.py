"""`python -m ddptrain.worker` as a process: it joins, reports its slots, and cleans up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddptrain.worker import driver_calls
from ddptrain.worker.rank_server_client import RankServerLost
from tests.unit.worker.daskbench import DaskBench, Driver, ended, until_gone
from tests.unit.worker.stubs import Bench, until

pytestmark = pytest.mark.slow  # all together

SLEEPER = "import os, time; say(os.getpid()); time.sleep(600)"


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[DaskBench]:
    """A folder for a scheduler and workers with stub ranks, also for their temporary files."""
    (tmp_path / "tmp").mkdir()
    with DaskBench(tmp_path, Bench(tmp_path).env | {"TMPDIR": str(tmp_path / "tmp")}) as bench:
        yield bench


def left_files(dask: DaskBench) -> list[Path]:
    return list((dask.folder / "tmp").iterdir())


def about(driver: Driver, worker: str = "ours") -> dict[str, Any]:
    """The scheduler's data on a worker."""
    return next(each for each in driver.about_workers.values() if each["name"] == worker)


def test_worker_waits_for_the_schedulers_file_and_becomes_warm(dask: DaskBench) -> None:
    dask.ours("--slots", "3", "--gpus", "none")
    dask.scheduler()
    with dask.driver(workers=1) as driver:
        warm = driver.call(driver_calls.wait_until_warm, 60.0, worker="ours")
        assert warm == {"ours": True, "warm": True, "fault": None}
        assert about(driver)["resources"] == {"slot": 3.0}
        until(lambda: about(driver)["metrics"].get("ddptrain") == {"warm": True, "ranks": 0}, "the metric")
        assert driver.call(driver_calls.describe_offer, worker="ours") == (3, 0)


def test_missing_address_of_the_scheduler_is_an_error(dask: DaskBench) -> None:
    worker = dask.ours("--timeout", "0.3")
    assert worker.wait(60) == 4
    assert "scheduler.json has no scheduler's address after 0.3 s: is it up?" in dask.log("ours").read_text()
    assert left_files(dask) == []


def test_scheduler_that_does_not_answer_is_an_error(dask: DaskBench) -> None:
    dask.scheduler_file.write_text('{"address": "tcp://127.0.0.1:9"}')
    worker = dask.ours("--timeout", "0.5")
    assert worker.wait(60) == 4
    assert "could not join the Dask scheduler at tcp://127.0.0.1:9" in dask.log("ours").read_text()
    assert left_files(dask) == []


def test_worker_with_gpus_has_a_slot_for_each_and_never_more(dask: DaskBench) -> None:
    dask.scheduler()
    dask.ours("--gpus", "4,5")
    with dask.driver(workers=1) as driver:
        assert about(driver)["resources"] == {"slot": 2.0, "GPU": 2.0}
        driver.attach("ours")
        code = "import os; say(os.environ['CUDA_VISIBLE_DEVICES'])"
        futures = [driver.start("ours", code, slot, slot=slot) for slot in range(2)]
        assert [ended(future).status for future in futures] == [0, 0]
        assert [driver.said("ours", rank) for rank in range(2)] == ["4\n", "5\n"]


def test_more_slots_than_gpus_are_refused(dask: DaskBench) -> None:
    dask.scheduler()
    assert dask.ours("--gpus", "0,1", "--slots", "3").wait(60) == 4
    assert "3 slots were asked for, but there are 2 GPUs here" in dask.log("ours").read_text()
    assert left_files(dask) == []


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "scheduler"])
def test_worker_ends_with_its_ranks_and_leaves_nothing(dask: DaskBench, end: str) -> None:
    scheduler = dask.scheduler()
    worker = dask.ours("--slots", "1", "--gpus", "none", "--scratch", str(dask.folder / "tmp" / "scratch"))
    with dask.driver(workers=1) as driver:
        driver.attach("ours")
        driver.start("ours", SLEEPER)
        driver.wait_for("ours", "\n")
        pid = int(driver.said("ours"))
        if end == "scheduler":
            scheduler.kill()
        else:
            worker.send_signal(signal.Signals[end])
        assert worker.wait(60) == 0, dask.log("ours").read_text()
    until_gone(pid)
    assert [list(folder.iterdir()) for folder in left_files(dask)] == [[]]


# Gets SIGTERM while it starts its rank server, or in an import that catches everything.
STARTING = """
import os, signal, sys, time
from ddptrain.worker import __main__ as worker

class Client(worker.RankServerClient):
    def __init__(self, *given):
        super().__init__(*given)
        print(self._process.pid, flush=True)
        if sys.argv[1] == "server":
            os.kill(os.getpid(), signal.SIGTERM)

def import_dask():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
    time.sleep(30)

worker.RankServerClient, worker._import_dask = Client, import_dask
worker.main(["--scheduler-file", "none", "--gpus", "none", "--scratch", sys.argv[2]])
"""


@pytest.mark.parametrize("when", ["server", "import"])
def test_worker_that_is_ended_while_it_starts_leaves_nothing(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-c", STARTING, when, str(tmp_path / "scratch")]
    done = subprocess.run(command, env=Bench(tmp_path).env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(f"/proc/{int(done.stdout)}").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_removed_run_ends_its_ranks_and_deletes_its_files(dask: DaskBench) -> None:
    dask.scheduler()
    dask.ours("--slots", "2", "--gpus", "none")
    with dask.driver("kept", workers=1) as kept, dask.driver("removed") as removed:
        for driver in (kept, removed):
            scratch = Path(driver.attach("ours")["scratch"])
        kept.start("ours", SLEEPER, slot=0)
        removed.start("ours", SLEEPER, slot=1)
        for driver in (kept, removed):
            driver.wait_for("ours", "\n")
        pids = [int(driver.said("ours")) for driver in (kept, removed)]
        removed.remove("ours")
        assert [Path(f"/proc/{pid}").exists() for pid in pids] == [True, False]
        assert not (scratch / "removed").exists()
        assert kept.said("ours")
        kept.remove("ours")
        assert sorted(path.name for path in scratch.iterdir()) == [
            ".lock",
            "dask-scratch-space",
            "rank-server.log",
            "token",
        ]


def test_rank_whose_driver_leaves_while_it_starts_is_ended(dask: DaskBench) -> None:
    dask.scheduler()
    dask.ours("--slots", "8", "--gpus", "none")
    with dask.driver(workers=1) as driver:
        driver.attach("ours")
        ended(driver.start("ours", "import os; say(os.getppid())", rank=99))
        server = psutil.Process(int(driver.said("ours", 99)))
        for turn in range(1, 30):
            future = driver.start("ours", SLEEPER, rank=turn, slot=turn % 8)
            time.sleep(0.002 * (turn % 10))
            future.cancel(force=True)
        until(lambda: about(driver)["metrics"]["ddptrain"]["ranks"] == 0, "the end of every rank")
        until(lambda: not server.children(), f"the end of {server.children()}")


def test_killed_rank_server_is_replaced_for_the_next_run(dask: DaskBench) -> None:
    dask.scheduler()
    dask.ours("--slots", "1", "--gpus", "none")
    with dask.driver("first", workers=1) as first, dask.driver("second") as second:
        first.attach("ours")
        rank = first.start("ours", "import os, time; os.kill(os.getppid(), 9); time.sleep(600)")
        with pytest.raises(RankServerLost, match="has ended"):
            ended(rank)
        second.attach("ours")
        assert ended(second.start("ours", "say('fresh')")).status == 0
        assert second.call(driver_calls.wait_until_warm, 60.0, worker="ours")["warm"]


def test_rank_whose_folder_is_not_on_its_host_runs_in_its_spool(dask: DaskBench) -> None:
    dask.scheduler()
    dask.ours("--slots", "1", "--gpus", "none")
    with dask.driver(workers=1) as driver:
        scratch = driver.attach("ours")["scratch"]
        assert ended(driver.start("ours", "say(spec.code.workdir)", workdir="/no/such/folder")).status == 0
        assert driver.said("ours").startswith(scratch)


def test_files_outside_of_the_scratch_folder_are_not_read(dask: DaskBench) -> None:
    dask.scheduler()
    dask.ours("--slots", "1", "--gpus", "none")
    with dask.driver(workers=1) as driver:
        scratch = driver.attach("ours")["scratch"]
        token = driver.call(driver_calls.read_spool, driver.run_id, f"{scratch}/token", 0, 100, worker="ours")
        assert token.decode() == driver.about["ours"]["token"]
        with pytest.raises(PermissionError, match="outside of the scratch folder"):
            driver.call(driver_calls.read_spool, driver.run_id, f"{scratch}/../../../etc/passwd", 0, 10, worker="ours")
