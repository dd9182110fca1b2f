"""What a keeper makes of a Cluster class; real ones are in tests/integration/test_deploy.py."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ddptrain.clusters import cluster_records, status
from ddptrain.clusters.backends import dask_class, dask_class_process, foreign_cluster
from ddptrain.clusters.backends.dask_class_process import DaskCluster, DaskClusterError, DaskClusterOrder
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.processes import DaemonId
from ddptrain.errors import ClusterError

FAKE = f"{__name__}.FakeCluster"


class FakeCluster:
    """A Cluster whose workers have joined as soon as they are ordered."""

    made: ClassVar[list[FakeCluster]] = []

    def __init__(self, n_workers: int = 0, slots: int | None = None, address: str = "tcp://127.0.0.1:1") -> None:
        self.scheduler_address = address
        self.status: Any = SimpleNamespace(name="running")
        self.scaled: list[int] = []
        resources = {} if slots is None else {"slot": float(slots)}
        worker = {"nthreads": slots or 1, "resources": resources}
        self.scheduler_info = {"workers": {f"tcp://w{number}": worker for number in range(n_workers)}}
        self._supports_scaling = n_workers != 9
        FakeCluster.made.append(self)

    @property
    def plan(self) -> set[str]:
        return set(self.scheduler_info["workers"])

    def scale(self, n: int) -> None:
        if n > 100:
            raise ValueError("quota\nexceeded") from OSError("429")
        self.scaled.append(n)

    def close(self) -> None:
        raise SystemExit("no permission to delete")


def kept(**kwargs: Any) -> tuple[DaskCluster, FakeCluster]:
    made = DaskCluster(DaskClusterOrder(FAKE, kwargs), Path("unused"), Path("unused"))
    return made, FakeCluster.made[-1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FargateCluster", "cluster.class FargateCluster contains no module: write it as package.Cluster"),
        (
            "not_there.aws.FargateCluster",
            "there is no module not_there (pip install not-there, if that is its package)",
        ),
        ("distributed.LocalClster", "the module distributed has no LocalClster (did you mean LocalCluster?)"),
        ("json.decoder.Cluster", "the module json.decoder has no Cluster"),
        ("collections.OrderedDict", "does not create a Dask cluster: the object has no scheduler_address"),
    ],
)
def test_class_that_is_none_is_told_in_one_line(name: str, words: str) -> None:
    with pytest.raises(DaskClusterError) as caught:
        DaskCluster(DaskClusterOrder(name, {}), Path("unused"), Path("unused"))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.is_usage


def test_module_that_its_own_import_lacks_is_the_one_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import boto_of_nobody.sessions")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DaskClusterError, match=r"no module boto_of_nobody .pip install boto-of-nobody,"):
        DaskCluster(DaskClusterOrder("half_there.Cluster", {}), Path("unused"), Path("unused"))


def test_asynchronous_cluster_is_refused() -> None:
    with pytest.raises(DaskClusterError, match="asynchronous can't be true"):
        DaskCluster(DaskClusterOrder(FAKE, {"asynchronous": True}), Path("unused"), Path("unused"))


def test_constructor_that_fails_is_told_with_what_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DaskClusterError) as caught:
        DaskCluster(DaskClusterOrder(FAKE, {"n_workers": "two"}), Path("unused"), Path("unused"))
    assert str(caught.value).startswith(f"{FAKE}(...) failed: TypeError: ")
    assert not caught.value.is_usage
    assert "Traceback" in capsys.readouterr().err, "all of it stands in the keeper's log"

    made, _ = kept()
    with pytest.raises(
        DaskClusterError, match=r"\.scale\(101\) failed: ValueError: quota exceeded, from OSError: 429$"
    ):
        made.resize(101)
    with pytest.raises(DaskClusterError, match=r"\.close\(\) failed: SystemExit: no permission to delete$"):
        made.close()


@pytest.mark.parametrize(
    ("kwargs", "slots", "workers", "scaled"),
    [
        ({}, None, 1, [1]),
        ({"n_workers": 3}, None, 3, []),
        ({"n_workers": 3}, 5, 5, [5]),
        ({"n_workers": 2}, 2, 2, [2]),  # one of them may have been lost
        ({"n_workers": 1, "slots": 4}, 9, 3, [3]),
        ({"slots": 4}, 9, 9, [9]),  # no worker tells yet what it offers
        ({"n_workers": 9}, 9, 9, []),
    ],
)
def test_slots_are_workers_unless_these_offer_several(
    kwargs: dict[str, Any], slots: int | None, workers: int, scaled: list[int]
) -> None:
    made, cluster = kept(**kwargs)
    assert made.resize(slots) == workers
    assert cluster.scaled == scaled


def test_cluster_that_can_not_be_scaled_says_so() -> None:
    made, _ = kept(n_workers=9)
    with pytest.raises(DaskClusterError, match="can't be scaled to 2 workers, it has 9"):
        made.resize(2)


def test_address_that_only_one_process_reaches_is_refused() -> None:
    made, _ = kept(address="inproc://10.0.0.1/123/1")
    with pytest.raises(DaskClusterError, match=r"at inproc://10.0.0.1/123/1, where no other process can reach it"):
        made.target()


def test_cluster_that_closes_by_itself_is_over() -> None:
    made, cluster = kept()
    assert not made.is_over()
    cluster.status = SimpleNamespace(name="closed")
    assert made.is_over()
    cluster.status = "failed"  # as some tell it
    assert made.is_over()


def test_order_comes_back_from_its_file_and_hides_its_arguments() -> None:
    order = DaskClusterOrder(FAKE, {"token": "secret-value"}, slots=2, idle_timeout_s=5.0, sys_path=["/a"])
    assert DaskClusterOrder(**json.loads(order.to_json())) == order
    assert "secret-value" not in repr(order)


# --- orders over the socket ---


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A cluster's folder, deeper than the path of a socket may be long."""
    home = tmp_path / ("x" * 60) / ("y" * 60)
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    monkeypatch.setattr(dask_class_process, "_ANSWER_S", 60.0)
    monkeypatch.chdir(tmp_path)  # to be put back: a keeper works in its cluster's folder
    record = ClusterRecord("dev", "class", "2026-01-01T00:00:00+00:00", settings={"class": FAKE, "kwargs": {}})
    return cluster_records.create(record)


KEEPER = DaemonId("keeper", 1, 0.0, "")


def served(listener: socket.socket, made: DaskCluster) -> threading.Thread:
    thread = threading.Thread(target=dask_class_process._answer, args=(listener, made))
    thread.start()
    return thread


def test_keeper_takes_orders_over_a_socket_in_the_clusters_folder(cluster: Deployment) -> None:
    made, fake = kept()
    with dask_class_process._listening(cluster.folder) as listener:
        thread = served(listener, made)
        assert dask_class._order(cluster, KEEPER, 3) == {"workers": 3}
        thread.join()
        assert fake.scaled == [3]
        thread = served(listener, made)
        with pytest.raises(ClusterError, match=r"quota exceeded.*; for details: ddptrain cluster logs dev"):
            dask_class._order(cluster, KEEPER, 101)
        thread.join()


def test_who_speaks_another_language_does_not_end_the_keeper(cluster: Deployment) -> None:
    made, fake = kept()
    for said in (b"", b"hello\n", b"[]\n", b'{"slots": "many"}\n', b"\xff\n"):
        with dask_class_process._listening(cluster.folder) as listener, socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(dask_class_process.SOCKET_FILE)
            stranger.sendall(said)
            stranger.close()
            dask_class_process._answer(listener, made)
    assert fake.scaled == []


def test_keeper_that_is_gone_is_told(cluster: Deployment) -> None:
    with pytest.raises(ClusterError, match=r"the process that holds the cluster dev \(pid 1\) does not answer"):
        dask_class._order(cluster, KEEPER, 3)


def test_cluster_whose_scheduler_is_too_busy_to_tell_its_runs_is_not_scaled(
    cluster: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backend may end the very workers that runs are on."""
    silent = status.View(cluster, status.State.ENDED, "tcp://h:1 does not answer within 15 s", certain=False)
    monkeypatch.setattr(status, "probe", lambda deployment, timeout_s: silent)
    with pytest.raises(ClusterError, match="can't find out which runs use the cluster dev: tcp://h:1 does not answer"):
        foreign_cluster.spare_runs(cluster, 1)
