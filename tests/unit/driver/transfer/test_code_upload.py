"""The project's code is uploaded once for each host, and only to workers that do not see its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.rank_specs import upload_code
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.transfer.code_package import CodePackage, pack
from ddptrain.errors import ClusterError, UsageError

CACHE = "/cache/code"


class Cluster:
    """Stands for a worker group: answers what workers on these hosts would answer, and notes the calls."""

    def __init__(self, hosts: dict[str, str], *, sees: Sequence[str] = ()) -> None:
        self.run_id = "run-1"
        self.client = SimpleNamespace(run=self._run)
        self.calls: list[tuple[str, list[str]]] = []
        self._hosts, self._sees = hosts, sees
        self._cached: set[str] = set()
        self.archive = b""

    def _run(self, function: Callable[..., Any], *arguments: Any, workers: list[str], on_error: str) -> dict[str, Any]:
        assert on_error == "return"
        name = function.__name__
        self.calls.append((name, workers))
        return {worker: self._answer(name, worker, arguments) for worker in workers}

    def _answer(self, name: str, worker: str, arguments: tuple[Any, ...]) -> Any:
        match name:
            case "sees_code":
                return worker in self._sees
            case "use_code":
                return CACHE if self._hosts[worker] in self._cached else ""
            case "write_spool":
                _, _, offset, chunk = arguments
                assert offset == len(self.archive), "chunks come in order, without gaps"
                self.archive += chunk
            case "unpack_code":
                self._cached.add(self._hosts[worker])
                return CACHE
        return None


def places(hosts: dict[str, str]) -> list[RankPlace]:
    found = []
    for rank, (worker, host) in enumerate(hosts.items()):
        slot = Slot(worker, host, 0, counted=True, gpu=False)
        found.append(RankPlace(rank, rank, 1, 0, slot, host, Path("/scratch"), shared=False))
    return found


@pytest.fixture
def package(tmp_path: Path) -> CodePackage:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return pack(tmp_path, [])


def upload(cluster: Cluster, hosts: dict[str, str], package: CodePackage, max_mb: float = 1.0) -> tuple[Any, list[str]]:
    lines: list[str] = []
    needed = package.folder / "train.py"
    return upload_code(cast(Any, cluster), places(hosts), package, needed, max_mb, lines.append), lines


def test_workers_that_see_the_folder_get_nothing(package: CodePackage) -> None:
    hosts = {"w1": "a", "w2": "b"}
    cluster = Cluster(hosts, sees=["w1", "w2"])
    done, lines = upload(cluster, hosts, package)
    assert (done.code, done.roots, lines) == ("", ["", ""], [])
    assert [name for name, _ in cluster.calls] == ["sees_code"]


def test_two_workers_of_one_host_get_one_copy(package: CodePackage) -> None:
    hosts = {"w1": "a", "w2": "b", "w3": "b"}
    cluster = Cluster(hosts, sees=["w1"])
    done, lines = upload(cluster, hosts, package)
    assert done.roots == ["", CACHE, CACHE]
    assert done.code == package.hash
    assert [workers for name, workers in cluster.calls if name == "unpack_code"] == [["w2"]]
    assert lines == [f"uploading 1 files of {package.folder} to host b"]
    assert cluster.archive == package.archive[0]
    again, lines = upload(cluster, hosts, package)
    assert (again.roots, lines) == (["", CACHE, CACHE], []), "it is in the cache of the host"


def test_code_that_is_too_large_is_refused_before_anything_is_sent(package: CodePackage) -> None:
    cluster = Cluster({"w1": "a"})
    with pytest.raises(UsageError, match="over 1e-06 MB"):
        upload(cluster, {"w1": "a"}, package, max_mb=1e-6)
    assert cluster.archive == b""


def test_worker_that_fails_is_named(package: CodePackage) -> None:
    cluster = Cluster({"w1": "a"})

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("the connection was lost")

    cluster.client.run = fail
    with pytest.raises(ClusterError, match=r"could not upload the code to w1: the connection was lost"):
        upload(cluster, {"w1": "a"}, package)


def test_of_many_workers_the_one_that_fails_is_named(package: CodePackage) -> None:
    cluster = Cluster({"w1": "a", "w2": "b"})
    error = ClusterError("cannot unpack the uploaded code into /home/x: Read-only file system")
    cluster.client.run = lambda function, *_, **__: {"w1": False, "w2": error}
    with pytest.raises(ClusterError, match=r"could not upload the code to w2: cannot unpack .*: Read-only file system"):
        upload(cluster, {"w1": "a", "w2": "b"}, package)


def test_lost_cluster_is_reported_as_it_is(package: CodePackage) -> None:
    cluster, lost = Cluster({"w1": "a"}), ClusterError("the scheduler is gone")

    def fail(*arguments: Any, **options: Any) -> Any:
        raise lost

    cluster.client.run = fail
    with pytest.raises(ClusterError) as caught:
        upload(cluster, {"w1": "a"}, package)
    assert caught.value is lost
