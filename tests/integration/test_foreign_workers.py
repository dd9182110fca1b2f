"""Workers that others have started (`dask worker`, with nannies): used, and left as they were found."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Worker

from ddptrain.worker import driver_calls
from tests.conftest import PATIENCE_S
from tests.unit.worker.daskbench import DaskBench, Driver, ended, until_gone
from tests.unit.worker.stubs import Bench, until

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(os.getpid())
time.sleep(60)
"""


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[DaskBench]:
    """A scheduler for workers whose ranks are stubs, and a folder of its own for temporary files."""
    (tmp_path / "tmp").mkdir()
    with DaskBench(tmp_path, Bench(tmp_path).env | {"TMPDIR": str(tmp_path / "tmp")}) as bench:
        bench.scheduler()
        yield bench


def state_of(driver: Driver, worker: str) -> dict[str, Any]:
    """All of a worker that a run could have changed."""

    def state(dask_worker: Worker) -> dict[str, Any]:  # inside, so that it travels by value
        process = psutil.Process()
        commands = {}
        for child in process.children():
            with contextlib.suppress(psutil.Error):  # it has ended
                commands[child.pid] = " ".join(child.cmdline())
        links = [str(link.laddr or link.raddr) for link in process.net_connections("unix")]
        return {
            "plugins": sorted(dask_worker.plugins),
            "metrics": sorted(dask_worker.metrics),
            "environ": dict(os.environ),
            "children": [pid for pid, command in commands.items() if "resource_tracker" not in command],
            # Not rglob, which raises where a folder goes while it is read.
            "files": sorted(glob(f"{dask_worker.local_directory}/**", recursive=True, include_hidden=True)),
            "sockets": [link for link in links if "ddptrain" in link],
            "cwd": os.getcwd(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "path": list(sys.path),
        }

    return dict(driver.call(state, worker=worker))


def states_again(driver: Driver, before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The state of the same workers, which may take a moment to be as it was."""
    deadline = time.monotonic() + PATIENCE_S
    while (now := {name: state_of(driver, name) for name in before}) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def test_each_worker_has_its_own_rank_server_and_is_left_as_it_was_found(dask: DaskBench) -> None:
    for name in ("one", "two"):
        dask.foreign(name=name, OPENBLAS_NUM_THREADS="3")
    with dask.driver(workers=2) as driver:
        before = {name: state_of(driver, name) for name in ("one", "two")}
        code = "import os, time; say(os.getppid()); time.sleep(0.5); say(dict(os.environ)['OPENBLAS_NUM_THREADS'])"
        for name in ("one", "two"):
            driver.attach(name)
        futures = [driver.start(name, code, rank) for rank, name in enumerate(("one", "two"))]
        assert [ended(future).status for future in futures] == [0, 0]
        servers = {driver.said(name, rank).split()[0] for rank, name in enumerate(("one", "two"))}
        assert len(servers) == 2
        assert driver.said("one").split()[1] == "3", "the user's own, which the nanny has only passed on"
        for name in ("one", "two"):
            driver.remove(name)
        for server in servers:
            until_gone(int(server))
        assert states_again(driver, before) == before
    assert list((dask.folder / "tmp").glob("ddptrain*")) == []
    assert "failed" not in dask.log("one").read_text()


def test_rank_gets_the_users_environment_and_not_the_nannys(dask: DaskBench) -> None:
    dask.foreign(MINE="mine")
    with dask.driver(workers=1) as driver:
        driver.attach("foreign")
        code = "import json, os; say(json.dumps(dict(os.environ)))"
        assert ended(driver.start("foreign", code)).status == 0
        environ = json.loads(driver.said("foreign"))
        driver.remove("foreign")
    assert environ["MINE"] == "mine"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert environ["MALLOC_TRIM_THRESHOLD_"] == "2000000000"
    assert not {"PYTHONHASHSEED", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"} & environ.keys()


def test_worker_is_attached_once_however_often_it_is_asked(dask: DaskBench) -> None:
    dask.foreign()
    with dask.driver(workers=1) as driver:
        first = driver.attach("foreign")
        assert driver.attach("foreign") == first
        assert Path(first["scratch"], "token").read_text() == first["token"]
        driver.remove("foreign")


def test_slot_of_a_dead_driver_is_used_again_only_when_its_rank_has_ended(dask: DaskBench) -> None:
    dask.foreign()
    with dask.driver("second", workers=1) as second:
        with dask.driver("first") as first:
            first.attach("foreign")
            second.attach("foreign")
            first.start("foreign", STUBBORN, grace_s=1.0)
            first.wait_for("foreign", "\n")
            old = int(first.said("foreign"))
        # The first driver is gone, and its keys with it; nobody has removed its plugin yet.
        later = second.start("foreign", f"import os; say(os.path.exists('/proc/{old}'))")
        assert ended(later).status == 0
        assert second.said("foreign") == "False\n"
        first.client = second.client
        first.remove("foreign")
        second.remove("foreign")


def test_foreign_worker_offers_one_slot_or_those_of_its_resource(dask: DaskBench) -> None:
    dask.foreign(name="plain")
    dask.foreign("--resources", "slot=3", "--nthreads", "8", name="slots")
    dask.foreign("--resources", "slot=3", name="few-threads")
    with dask.driver(workers=3) as driver:
        offers = {name: driver.call(driver_calls.describe_offer, worker=name) for name in driver.workers}
        warm = driver.call(driver_calls.wait_until_warm, 30.0, worker="plain")
    assert {name: (offer["slots"], offer["gpus"], offer["ours"]) for name, offer in offers.items()} == {
        "plain": (1, 0, False),
        "slots": (3, 0, False),
        "few-threads": (1, 0, False),
    }
    assert (warm["ours"], warm["warm"], warm["fault"]) == (False, False, None)


def test_unknown_run_is_told(dask: DaskBench) -> None:
    dask.foreign()
    with dask.driver(workers=1) as driver:
        with pytest.raises(Exception, match="run r-1 is not attached"):
            driver.call(driver_calls.read_spool, driver.run_id, "/etc/passwd", 0, 10, worker="foreign")
        driver.call(driver_calls.stop_ranks, driver.run_id, ["x"], 1.0, worker="foreign")


def test_gang_trains_on_workers_of_others(tmp_path: Path) -> None:
    """With torch, a process group over gloo, and the store of rank 0."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "sums.py").write_text(
        "import torch, torch.distributed as dist\n"
        "def main(ctx):\n"
        "    total = torch.tensor([float(ctx.rank + 1)])\n"
        "    dist.all_reduce(total)\n"
        "    print('total', total.item())\n"
    )
    with DaskBench(tmp_path, {**os.environ, "TMPDIR": str(tmp_path / "tmp")}) as dask:
        dask.scheduler()
        for name in ("one", "two"):
            dask.foreign(name=name)
        with dask.driver(workers=2) as driver:
            for name in ("one", "two"):
                driver.attach(name)
            spec = {"workload": "sums:main", "params": {}, "sys_path": (str(tmp_path),), "env": {}}
            worker_group = {"world_size": 2, "local_world_size": 2, **spec}
            first = driver.start("one", "", 0, master_port=0, **worker_group)
            until(lambda: any("port" in notice for notice in driver.notices), "the store's port", 60)
            port = next(notice["port"] for notice in driver.notices if "port" in notice)
            second = driver.start("two", "", 1, local_rank=1, master_port=port, **worker_group)
            assert [ended(first).status, ended(second).status] == [0, 0], driver.said("one") + driver.said("two", 1)
            assert (driver.said("one"), driver.said("two", 1)) == ("total 3.0\n", "total 3.0\n")
            for name in ("one", "two"):
                driver.remove(name)
    assert list((tmp_path / "tmp").glob("ddptrain*")) == []
