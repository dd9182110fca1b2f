"""The keeper of a Dask cluster object in this process, and what the commands do with a keeper."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import LocalCluster, Security

from ddptrain.clusters import cluster_records
from ddptrain.clusters.backends import dask_class
from ddptrain.clusters.backends import dask_class_process as process
from ddptrain.clusters.backends.dask_class import DeployProvider
from ddptrain.clusters.backends.dask_class_process import DaskClusterError, DaskClusterOrder
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.processes import DaemonId, DaemonOrder
from ddptrain.clusters.resolve import Target
from ddptrain.errors import ClusterError, UsageError


class FakeDaskCluster:
    """A cluster object of the class x.Cluster; `fails` names the methods that fail."""

    name = "x.Cluster"

    def __init__(self, *fails: str) -> None:
        self.fails, self.over = fails, False
        self.resized: list[int | None] = []
        self.closed = 0

    def target(self) -> Target:
        self._fail("target")
        return Target("tcp://10.0.0.1:1", None)

    def dashboard(self) -> str:
        return "http://d"

    def resize(self, slots: int | None) -> int:
        self.resized.append(slots)
        self._fail("resize")
        return 7

    def is_over(self) -> bool:
        return self.over

    def close(self) -> None:
        self.closed += 1
        self._fail("close")

    def _fail(self, method: str) -> None:
        if method in self.fails:
            raise DaskClusterError(f"{method} failed")


class FakeSigterm:
    """SIGTERM to the keeper, by hand."""

    def __init__(self, *, sigterm: bool = False) -> None:
        self.ear, self.mouth = socket.socketpair()
        self.is_set = sigterm

    def __bool__(self) -> bool:
        return self.is_set

    def fileno(self) -> int:
        return self.ear.fileno()


@pytest.fixture
def sigterm() -> Iterator[FakeSigterm]:
    made = FakeSigterm()
    yield made
    made.ear.close()
    made.mouth.close()


class Watch:
    """An idle watch that is over after some looks."""

    looks, pause_s = 99, 0.0

    def __init__(self, target: Target, timeout_s: float) -> None:
        assert (target.address, timeout_s) == ("tcp://10.0.0.1:1", 60.0)
        self.left = Watch.looks

    def is_over(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process, "IdleWatch", Watch)
    monkeypatch.setattr(Watch, "looks", 99)
    monkeypatch.chdir(tmp_path)  # the keeper changes its folder
    return tmp_path


ORDER = DaskClusterOrder("x.Cluster", {}, slots=3, idle_timeout_s=60.0)


def ended(folder: Path) -> dict[str, Any] | None:
    """What ended.json says, without its time."""
    path = folder / "ended.json"
    found = json.loads(path.read_text()) if path.exists() else None
    return found and {name: value for name, value in found.items() if name != "at"}


@pytest.mark.parametrize(
    ("fails", "over", "looks", "code", "resized", "reason"),
    [
        ((), False, 2, 0, [3], {"reason": "idle for 60 s", "is_left": False}),
        ((), True, 2, 0, [3], {"reason": "x.Cluster has closed by itself", "is_left": False}),
        (("target",), False, 2, 0, [], {"reason": "target failed", "is_left": False}),
        (("resize",), False, 2, 0, [3], {"reason": "resize failed", "is_left": False}),
        (
            ("close",),
            False,
            2,
            1,
            [3],
            {"reason": "idle for 60 s; close failed; what it has started may still be there", "is_left": True},
        ),
    ],
)
def test_keeper_closes_its_cluster_and_says_why_it_ended(
    folder: Path,
    sigterm: FakeSigterm,
    fails: tuple[str, ...],
    over: bool,
    looks: int,
    code: int,
    resized: list[int],
    reason: dict[str, Any],
) -> None:
    kept = FakeDaskCluster(*fails)
    kept.over, Watch.looks = over, looks
    assert process._run(kept, ORDER, folder, sigterm) == code  # type: ignore[arg-type]
    assert (kept.closed, kept.resized, ended(folder)) == (1, resized, reason)
    assert not (folder / "scheduler.json").exists()


@pytest.mark.parametrize(
    ("fails", "code", "reason"),
    [
        ((), 0, None),
        (("close",), 1, {"reason": "close failed; what it has started may still be there", "is_left": True}),
    ],
)
def test_keeper_that_is_told_to_end_before_it_serves_only_closes(
    folder: Path, sigterm: FakeSigterm, fails: tuple[str, ...], code: int, reason: dict[str, Any] | None
) -> None:
    kept = FakeDaskCluster(*fails)
    sigterm.is_set = True
    assert process._run(kept, ORDER, folder, sigterm) == code  # type: ignore[arg-type]
    assert (kept.closed, kept.resized, ended(folder)) == (1, [], reason)


def test_keeper_answers_requests_and_shows_where_its_cluster_is(folder: Path, sigterm: FakeSigterm) -> None:
    kept, answers, cards = FakeDaskCluster(), list[Any](), list[Any]()
    questions = ['{"slots": 5}\n', "no json\n", '{"slots": null}\n', '{"slots": 6}\n']
    connections: list[socket.socket] = []

    def is_over() -> bool:
        """Called after each request: reads the answer, and asks the next."""
        if connections:
            answers.append(connections[-1].makefile().readline())
            connections.pop().close()
        else:
            cards.append(json.loads((folder / "scheduler.json").read_text()))
        if not questions:
            sigterm.is_set = True
            sigterm.mouth.send(b"!")
            return False
        connections.append(socket.socket(socket.AF_UNIX))
        connections[-1].connect(str(folder / "keeper.sock"))
        text = questions.pop(0)
        if not questions:
            kept.fails = ("resize",)
        connections[-1].sendall(text.encode())
        return False

    kept.is_over = is_over  # type: ignore[method-assign]
    assert process._serve(kept, ORDER, folder, sigterm) == ""  # type: ignore[arg-type]
    assert answers == ['{"workers": 7}\n', "", "", '{"error": "resize failed"}\n'] and kept.resized == [3, 5, 6]
    assert cards == [
        {
            "address": "tcp://10.0.0.1:1",
            "dashboard": "http://d",
            "workers": 7,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
    ]


def test_signal_is_taken_once_and_ignored_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with process._SigtermFlag() as sigterm:
            assert not sigterm
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
            assert sigterm and sigterm._reader.recv(9) == b"!"
            assert sigterm.fileno() == sigterm._reader.fileno()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_class_that_cant_be_created_ends_the_keeper_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "order.json").write_text(DaskClusterOrder("Cluster", {}, sys_path=["/p"]).to_json())
    path = ["/a"]
    monkeypatch.setattr(sys, "path", path)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert process.main(["--folder", str(folder)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert path == ["/a", "/p"]
    reason = "cluster.class Cluster contains no module: write it as package.Cluster"
    assert ended(folder) == {"reason": reason, "is_usage": True}


@pytest.mark.parametrize(
    ("worker", "slots"),
    [
        ({}, 1),
        ({"nthreads": 4}, 1),
        ({"resources": {"slot": 4.0}}, 4),
        ({"resources": {"slot": 4.0}, "nthreads": 2}, 2),
        ({"resources": {"slot": 0.0}, "nthreads": 2}, 1),
    ],
)
def test_slots_of_a_worker_are_its_resource_but_not_more_than_its_threads(worker: dict[str, Any], slots: int) -> None:
    assert process._slots(worker) == slots


class Own(LocalCluster):
    """A LocalCluster that takes no security."""

    def __init__(self, n_workers: int = 0) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("made", "kwargs", "secured"),
    [
        (LocalCluster, {}, True),
        (LocalCluster, {"processes": True}, True),
        (LocalCluster, {"processes": False}, False),
        (LocalCluster, {"security": None}, False),
        (LocalCluster, {"protocol": "tcp"}, False),
        (Own, {}, False),
        (lambda security: None, {}, False),
    ],
)
def test_cluster_of_this_machine_gets_a_certificate_unless_it_is_chosen(
    tmp_path: Path, made: Any, kwargs: dict[str, Any], secured: bool
) -> None:
    found = process._own_security(made, kwargs, tmp_path)
    assert (tmp_path / "cert.pem").exists() is secured and found.keys() == ({"security"} if secured else set())
    if secured:
        assert isinstance(found["security"], Security)


class StrictCluster:
    """A cluster class whose worker refuses an argument of `kwargs`, as that of a LocalCluster does."""

    def __init__(self, **kwargs: Any) -> None:
        refusal = TypeError("Server.__init__() got an unexpected keyword argument 'n_worker'")
        raise RuntimeError("Nanny failed to start.") from refusal


@pytest.mark.parametrize(
    ("kwargs", "is_usage", "text"),
    [
        ({"n_worker": 2}, True, "cluster.kwargs: StrictCluster got an unexpected keyword argument 'n_worker'"),
        ({"other": 2}, False, "StrictCluster(...) failed: RuntimeError: Nanny failed to start., from TypeError: "),
    ],
)
def test_wrong_name_in_kwargs_is_an_error_of_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kwargs: dict[str, Any], is_usage: bool, text: str
) -> None:
    monkeypatch.setattr(process, "_imported", lambda name: StrictCluster)
    with pytest.raises(process.DaskClusterError) as caught:
        process.DaskCluster(DaskClusterOrder("StrictCluster", kwargs), tmp_path, tmp_path)
    assert caught.value.is_usage is is_usage and str(caught.value).startswith(text)


class FolderCluster(LocalCluster):
    """A LocalCluster that starts nothing; it knows where Dask would put its folders."""

    scheduler_address = "tls://127.0.0.1:1"

    def __init__(self) -> None:
        self.folder = dask.config.get("temporary-directory", None)


@pytest.mark.parametrize("chosen", [None, "/scratch"])
def test_processes_of_this_machine_have_a_private_folder_unless_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.setattr(process, "_imported", lambda name: FolderCluster)
    with dask.config.set({"temporary-directory": chosen}):
        kept = process.DaskCluster(DaskClusterOrder("FolderCluster", {}), tmp_path, tmp_path / "scratch")
    assert kept._cluster.folder == (chosen or str(tmp_path / "scratch"))


def test_error_is_told_with_its_causes_each_once_and_cut() -> None:
    first = ValueError("a\n  b")
    second, third = RuntimeError("a"), RuntimeError()
    first.__cause__, second.__cause__ = second, third
    assert process._one_line(first) == "ValueError: a b, from RuntimeError: a, from RuntimeError"
    same = RuntimeError()
    same.__cause__ = RuntimeError()
    assert process._one_line(same) == "RuntimeError"
    assert len(process._one_line(ValueError("x" * 1000))) == 500


# --- the commands ---


class Processes:
    """Processes of this host: which were started, and whether they run."""

    def __init__(self) -> None:
        self.orders: list[DaemonOrder] = []
        self.running = True
        self.log = ""
        self.killed: list[tuple[int, int]] = []

    def start(self, order: DaemonOrder) -> DaemonId:
        self.orders.append(order)
        return DaemonId(order.name, 4711, 1.0, order.folder)

    def alive(self, daemon: DaemonId) -> bool:
        assert daemon.pid == 4711
        return self.running

    def tail(self, folder: str, name: str, lines: int) -> str:
        assert (name, lines) == ("keeper", 8)
        return self.log


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made, now = Processes(), [0.0]
    monkeypatch.setattr(dask_class, "processes", made)

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 0.05)

    monkeypatch.setattr(dask_class, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return made


def deployment(ranks: Any = "auto", timeout_s: float = 12.0) -> Deployment:
    settings = {"class": "x.Cluster", "kwargs": {"n": 1}, "ranks": ranks, "start_timeout_s": timeout_s}
    return cluster_records.create(ClusterRecord("dev", "deploy", "now", settings=settings, idle_timeout_s=60.0))


@pytest.mark.parametrize(
    ("ranks", "slots", "ordered"), [("auto", None, None), (3, None, 3), (3, 5, 5), ({"min": 1, "max": 2}, None, None)]
)
def test_keeper_is_started_with_the_order(there: Processes, ranks: Any, slots: int | None, ordered: int | None) -> None:
    cluster = deployment(ranks)
    (cluster.folder / "scheduler.json").write_text('{"address": "tcp://a", "workers": 4}')
    DeployProvider().scale(cluster, slots, print)
    (order,) = there.orders
    assert order.argv == ["-m", "ddptrain.clusters.backends.dask_class_process", "--folder", str(cluster.folder)]
    expected = {
        "cls": "x.Cluster",
        "kwargs": {"n": 1},
        "slots": ordered,
        "idle_timeout_s": 60.0,
        "sys_path": [os.getcwd()],
    }
    assert json.loads(order.files["order.json"]) == expected
    assert cluster.record.workers == 4 and cluster.record.parts["keeper"]["pid"] == 4711


@pytest.mark.parametrize(
    ("reason", "log", "kind", "told"),
    [
        ({"reason": "bad class", "is_usage": True}, "trace", UsageError, "bad class"),
        ({"reason": "quota"}, "one\ntwo\n", ClusterError, "quota\nlast lines of its log:\n  one\n  two"),
        ({}, " ", ClusterError, "the process that holds the cluster (pid 4711) has ended"),
    ],
)
def test_keeper_that_ends_while_it_starts_is_told(
    there: Processes, reason: dict[str, Any], log: str, kind: type[Exception], told: str
) -> None:
    cluster = deployment()
    if reason:
        (cluster.folder / "ended.json").write_text(json.dumps(reason))
    there.running, there.log = False, log
    with pytest.raises(kind) as error:
        DeployProvider().scale(cluster, None, print)
    assert str(error.value) == told and DeployProvider().fault(cluster) == told
    there.running = True
    assert DeployProvider().fault(cluster) is None


def test_cluster_that_does_not_come_up_is_told_after_its_time(there: Processes) -> None:
    cluster, told = deployment(), list[str]()
    there.log = "asks\n"
    with pytest.raises(ClusterError) as error:
        DeployProvider().scale(cluster, None, told.append)
    text = "x.Cluster is not up after 12 s (cluster.start_timeout_s)\nlast lines of its log:\n  asks"
    assert str(error.value) == text and told == ["x.Cluster is starting"] * 2


@pytest.mark.parametrize(("is_up", "words"), [(True, "closing"), (False, "still starting, and is closed after that")])
def test_keeper_is_told_to_end_and_waited_for(
    there: Processes, monkeypatch: pytest.MonkeyPatch, is_up: bool, words: str
) -> None:
    cluster, told = deployment(), list[str]()
    provider = DeployProvider()
    provider.stop(cluster, told.append)
    assert provider.fault(cluster) is None and not there.killed
    cluster.update(parts={"keeper": {"name": "keeper", "pid": 4711, "created": 1.0, "folder": "f"}})
    cluster.update(address="tcp://a" if is_up else "")
    monkeypatch.setattr(os, "kill", lambda *sent: there.killed.append(sent))
    with pytest.raises(
        ClusterError,
        match=f"^x.Cluster is still {'closing' if is_up else 'being built'} after 60 s: the process that holds it",
    ):
        provider.stop(cluster, told.append)
    assert there.killed == [(4711, signal.SIGTERM)] and told == [f"x.Cluster is {words}"] * 11

    def kill(pid: int, number: int) -> None:
        there.running = False

    monkeypatch.setattr(os, "kill", kill)
    provider.stop(cluster, told.append)
    assert len(told) == 11 and cluster.record.parts
    provider.stop(cluster, told.append)
    killed = "the process that holds the cluster (pid 4711) was killed"
    assert told[11:] == [f"{killed}: what x.Cluster has started on other hosts may still run"]
    (cluster.folder / "ended.json").write_text('{"reason": "no permission", "is_left": true}')
    with pytest.raises(ClusterError, match=r"^no permission; ddptrain cluster down dev deletes its record$"):
        provider.stop(cluster, told.append)
    assert cluster.record.parts == {} and len(told) == 12
