"""The check of clusters that ddptrain has not started, with real Dask processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.clusters.compatibility import check_cluster
from ddptrain.errors import ClusterError
from tests.support.environments import make_environment
from tests.unit.worker.daskbench import DaskBench, Driver


def refused(driver: Driver) -> list[str]:
    with pytest.raises(ClusterError) as error:
        check_cluster(driver.client, list(driver.client.nthreads()))
    return str(error.value).splitlines()


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[DaskBench]:
    with DaskBench(tmp_path) as bench:
        bench.scheduler()
        yield bench


def start_worker(dask: DaskBench, name: str, python: Path | None = None) -> None:
    """A `dask worker` of another environment, without what PYTHONPATH (-E) names here, or of this one."""
    other = () if python is None else ("-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", str(python), "-E")
    where = ("--scheduler-file", str(dask.scheduler_file), "--local-directory", str(dask.folder / name))
    command = ("-P", "-m", "distributed.cli.dask_worker", *where, "--nthreads", "1", "--no-dashboard", "--name", name)
    dask.start(name, *other, *command)


_LOADED = "[name for name in ('torch', 'ddptrain') if name in __import__('sys').modules]"


def test_worker_without_ddptrain_or_with_another_torch_is_marked_and_a_silent_one_is_an_error(dask: DaskBench) -> None:
    python = make_environment(dask.folder / "env", without="ddptrain", versions={"torch": "2.0.0"})
    start_worker(dask, "bare", python)
    start_worker(dask, "fine")
    with dask.driver(workers=2) as driver:
        lines = refused(driver)
        bare = driver.workers["bare"]
        assert driver.client.run(eval, _LOADED, workers=[bare]) == {bare: []}, "the check has imported something heavy"
        check_cluster(driver.client, [driver.workers["fine"]])
        with stopped(driver.call(os.getpid, worker="fine")):
            assert "do not all answer within 10 s" in refused(driver)[0]
    (row,) = [line for line in lines if "missing !" in line]
    assert "2.0.0 !" in row and row.count(" !") == 2
    assert "pip install ddptrain==" in lines[-1]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
