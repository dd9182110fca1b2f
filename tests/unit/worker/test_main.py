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
from tests.support.command import wait_until
from tests.unit.worker.daskbench import DaskBench, Driver, ended, until_gone
from tests.unit.worker.stubs import Bench

pytestmark = pytest.mark.slow  # all together

SLEEPER = "import os, time; say(os.getpid()); time.sleep(600)"


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskBench]:
    """A scheduler, and a warm worker with 8 slots that was up before it, with stub ranks."""
    folder = tmp_path_factory.mktemp("dask")
    (folder / "tmp").mkdir()
    with DaskBench(folder, Bench(folder).env | {"TMPDIR": str(folder / "tmp")}) as bench:
        bench.ours("--slots", "8", "--gpus", "none")
        bench.scheduler()
        with bench.driver(workers=1) as driver:
            warm = driver.call(driver_calls.wait_until_warm, 60.0, worker="ours")
            assert warm == {"ours": True, "warm": True, "fault": None}
        yield bench


@pytest.fixture
def own(dask: DaskBench, tmp_path: Path) -> Iterator[DaskBench]:
    """For other workers of that scheduler, which end with the test; temporary files are in a folder of their own."""
    (tmp_path / "tmp").mkdir()
    with DaskBench(tmp_path, dask.env | {"TMPDIR": str(tmp_path / "tmp")}) as bench:
        bench.scheduler_file = dask.scheduler_file
        yield bench


def left_files(dask: DaskBench) -> list[Path]:
    return list((dask.folder / "tmp").iterdir())


def about(driver: Driver, worker: str = "ours") -> dict[str, Any]:
    """The scheduler's data on a worker, once it has joined."""
    wait_until(lambda: worker in driver.workers, f"the worker {worker}")
    return next(each for each in driver.about_workers.values() if each["name"] == worker)


def test_warm_worker_says_what_it_offers(dask: DaskBench) -> None:
    with dask.driver() as driver:
        assert about(driver)["resources"] == {"slot": 8.0}
        wait_until(lambda: about(driver)["metrics"].get("ddptrain") == {"warm": True, "ranks": 0}, "the metric")
        assert driver.call(driver_calls.describe_offer, worker="ours") == (8, 0)


@pytest.mark.parametrize(
    ("address", "options", "reason"),
    [
        (None, ["--timeout", "0.3"], "scheduler.json has no scheduler's address after 0.3 s: is it up?"),
        ("tcp://127.0.0.1:9", ["--timeout", "0.5"], "could not join the Dask scheduler at tcp://127.0.0.1:9"),
        (None, ["--gpus", "0,1", "--slots", "3"], "3 slots were asked for, but there are 2 GPUs here"),
    ],
)
def test_worker_that_can_not_start_is_an_error(
    own: DaskBench, address: str | None, options: list[str], reason: str
) -> None:
    own.scheduler_file = own.folder / "scheduler.json"
    if address:
        own.scheduler_file.write_text(f'{{"address": "{address}"}}')
    assert own.ours(*options).wait(60) == 4
    assert reason in own.log("ours").read_text()
    assert left_files(own) == []


def test_worker_with_gpus_has_a_slot_for_each_and_never_more(own: DaskBench) -> None:
    own.ours("--gpus", "4,5", name="gpus")
    with own.driver("gpus") as driver:
        assert about(driver, "gpus")["resources"] == {"slot": 2.0, "GPU": 2.0}
        driver.attach("gpus")
        code = "import os; say(os.environ['CUDA_VISIBLE_DEVICES'])"
        futures = [driver.start("gpus", code, slot, slot=slot) for slot in range(2)]
        assert [ended(future).status for future in futures] == [0, 0]
        assert [driver.said("gpus", rank) for rank in range(2)] == ["4\n", "5\n"]


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "scheduler"])
def test_worker_ends_with_its_ranks_and_leaves_nothing(own: DaskBench, end: str) -> None:
    if end == "scheduler":
        own.scheduler_file = own.folder / "scheduler.json"
        scheduler = own.scheduler()
    worker = own.ours(
        "--slots", "1", "--gpus", "none", "--scratch", str(own.folder / "tmp" / "scratch"), name=f"ends-{end}"
    )
    with own.driver("ends") as driver:
        about(driver, f"ends-{end}")
        driver.attach(f"ends-{end}")
        driver.start(f"ends-{end}", SLEEPER)
        driver.wait_for(f"ends-{end}", "\n")
        pid = int(driver.said(f"ends-{end}"))
        if end == "scheduler":
            scheduler.kill()
        else:
            worker.send_signal(signal.Signals[end])
        assert worker.wait(60) == 0, own.log(f"ends-{end}").read_text()
    until_gone(pid)
    assert [list(folder.iterdir()) for folder in left_files(own)] == [[]]


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
    with dask.driver("kept") as kept, dask.driver("removed") as removed:
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
        own = [".lock", "dask-scratch-space", "rank-server.log", "token"]
        assert sorted(path.name for path in scratch.iterdir() if not path.name.startswith("r-")) == own


def test_rank_whose_driver_leaves_while_it_starts_is_ended(dask: DaskBench) -> None:
    with dask.driver("r-leaves") as driver:
        driver.attach("ours")
        ended(driver.start("ours", "import os; say(os.getppid())", rank=99))
        server = psutil.Process(int(driver.said("ours", 99)))
        for turn in range(1, 20):
            future = driver.start("ours", SLEEPER, rank=turn, slot=turn % 8)
            time.sleep(0.002 * (turn % 10))
            future.cancel(force=True)
        wait_until(lambda: about(driver)["metrics"]["ddptrain"]["ranks"] == 0, "the end of every rank")
        wait_until(lambda: not server.children(), f"the end of {server.children()}")


def test_killed_rank_server_is_replaced_for_the_next_run(own: DaskBench) -> None:
    own.ours("--slots", "1", "--gpus", "none", name="kills")
    with own.driver("r-first") as first, own.driver("r-second") as second:
        about(first, "kills")
        first.attach("kills")
        rank = first.start("kills", "import os, time; os.kill(os.getppid(), 9); time.sleep(600)")
        with pytest.raises(RankServerLost, match="has ended"):
            ended(rank)
        second.attach("kills")
        assert ended(second.start("kills", "say('fresh')")).status == 0
        assert second.call(driver_calls.wait_until_warm, 60.0, worker="kills")["warm"]


def test_rank_whose_folder_is_not_on_its_host_runs_in_its_spool(dask: DaskBench) -> None:
    with dask.driver("r-folder") as driver:
        scratch = driver.attach("ours")["scratch"]
        assert ended(driver.start("ours", "say(spec.code.workdir)", workdir="/no/such/folder")).status == 0
        assert driver.said("ours").startswith(scratch)
