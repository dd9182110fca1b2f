"""The check of clusters of others: what does not fit is one table."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pytest

from ddptrain.clusters.check import Needs, check_cluster
from ddptrain.errors import ClusterError

OURS = {name: version(name) for name in ("ddptrain", "torch", "distributed", "dask-pytorch-ddp")}
NEEDS = Needs("mine.training:main", ("/srv/code",))


def told(python: str = platform.python_version(), workload: bool = True, **packages: str | None) -> str:
    versions = {**OURS, **{name.replace("_", "-"): value for name, value in packages.items()}}
    return json.dumps({"python": python, "packages": versions, "workload": workload})


class FakeClient:
    """Answers as a scheduler and its workers would."""

    scheduler = None

    def __init__(self, workers: Mapping[str, Any], scheduler: Any = None) -> None:
        self.workers, self.on_scheduler = workers, scheduler or told()

    def run_on_scheduler(self, function: Callable[[str], str], text: str) -> Any:
        assert function is eval  # by reference: no code of ours is sent
        return self.on_scheduler

    def run(self, function: Callable[[str], str], text: str, workers: Sequence[str], on_error: str) -> dict[str, Any]:
        assert function is eval and on_error == "return"
        return {worker: self.workers[worker] for worker in workers if worker in self.workers}


def table(workers: Mapping[str, Any], scheduler: Any = None, needs: Needs = NEEDS) -> str:
    with pytest.raises(ClusterError) as refused:
        check_cluster(FakeClient(workers, scheduler), list(workers), needs)  # type: ignore[arg-type]
    return str(refused.value)


def test_cluster_that_fits_is_taken() -> None:
    client: Any = FakeClient({"tcp://a:1": told(), "tcp://b:1": told()})
    check_cluster(client, ["tcp://a:1", "tcp://b:1"], NEEDS)


def test_other_torch_than_the_drivers_is_fine_where_all_workers_have_it() -> None:
    workers = {"tcp://a:1": told(torch="2.7.0"), "tcp://b:1": told(torch="2.7.0")}
    client: Any = FakeClient(workers, told(torch=None, workload=False))
    check_cluster(client, list(workers), NEEDS)


def test_one_table_tells_all_that_does_not_fit() -> None:
    text = table(
        {
            "tcp://10.0.0.1:1": told(),
            "tcp://10.0.0.2:1": told(ddptrain=None, torch=None, workload=False),
            "tcp://10.0.0.2:2": told(ddptrain=None, torch=None, workload=False),
        }
    )
    lines = text.splitlines()
    assert lines[0] == "the cluster can't run this (! is what does not fit):"
    assert lines[1].split() == ["Python", "ddptrain", "torch", "distributed", "dask-pytorch-ddp", "mine"]
    assert [line.split()[0] for line in lines[2:5]] == ["driver", "scheduler", "tcp://10.0.0.1:1"]
    assert lines[5].startswith("  10.0.0.2 (2 processes)  ")
    assert lines[5].count("missing !") == 3
    assert f"pip install ddptrain=={OURS['ddptrain']} torch" in lines[6]
    assert "install the module mine there" in lines[7]


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (told(python="3.8.1"), f"use Python {'.'.join(platform.python_version_tuple()[:2])} there"),
        (told(ddptrain="0.0.1"), f"pip install ddptrain=={OURS['ddptrain']}"),
        (told(distributed="2024.12.1"), "pip install distributed"),
        (told(dask_pytorch_ddp=None), "pip install dask-pytorch-ddp"),
        (told(workload=False), "install the module mine"),
    ],
)
def test_each_misfit_says_what_to_do(answer: str, advice: str) -> None:
    assert advice in table({"tcp://a:1": answer})


def test_workers_with_different_torch_are_told() -> None:
    assert "2.6.0 !" in table({"tcp://a:1": told(torch="2.6.0"), "tcp://b:1": told()})


def test_scheduler_without_ddptrain_is_told() -> None:
    assert "scheduler" in table({"tcp://a:1": told()}, told(ddptrain=None))


@pytest.mark.parametrize("answer", [OSError("gone"), None])
def test_worker_that_cannot_be_asked_is_named(answer: object) -> None:
    assert "tcp://a:1 could not be asked" in table({"tcp://a:1": answer})


def test_probe_runs_where_nothing_of_ours_is_known() -> None:
    """It is text for a bare interpreter's eval: what it says of this one is true."""

    class Bare(FakeClient):
        def run(self, function: Any, text: str, workers: Sequence[str], on_error: str) -> dict[str, Any]:
            return {worker: eval(text, {}) for worker in workers}

    client: Any = Bare({"tcp://a:1": None})
    check_cluster(client, ["tcp://a:1"], Needs("json:loads", ()))
    check_cluster(client, ["tcp://a:1"], Needs("test_check:x", (__file__.rpartition("/")[0],)))
    with pytest.raises(ClusterError, match="nowhere"):
        check_cluster(client, ["tcp://a:1"], Needs("nowhere:x", ()))
