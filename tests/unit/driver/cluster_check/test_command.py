"""The check of a cluster by itself: which slots it may take, and which cluster it opens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters.backends.attached import AttachedCluster
from ddptrain.clusters.scheduler import slots
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.driver.cluster_check import command
from ddptrain.driver.worker_group.reservation import SlotRequest
from ddptrain.errors import ClusterError


def group(workers: Sequence[tuple[str, int, int]], *waiting: str, **runs: list[str]) -> Any:
    """A worker group on workers with host, slots, and slots in use; `runs` has the hosts of each run."""

    def overview(function: Any) -> dict[str, Any]:
        assert function is slots.overview
        return {
            "workers": [{"host": host, "slots": count, "held": held} for host, count, held in workers],
            "runs": [{"run_id": run, "hosts": hosts} for run, hosts in runs.items()],
            "waiting": [{"run_id": run} for run in waiting],
        }

    return SimpleNamespace(client=SimpleNamespace(run_on_scheduler=overview))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([("a", 2, 0), ("b", 2, 1)], ({}, False)),
        ([("a", 2, 2), ("b", 2, 1)], ({"a": ("r1", "r2")}, False)),
        ([("a", 2, 2), ("a", 2, 1)], ({}, False)),  # another worker of the host has a slot
        ([("a", 2, 2), ("b", 1, 2)], ({"a": ("r1", "r2"), "b": ("r2",)}, True)),
        ([], ({}, False)),
    ],
)
def test_hosts_without_free_slots_are_named_with_their_runs(
    workers: list[tuple[str, int, int]], expected: tuple[dict[str, tuple[str, ...]], bool]
) -> None:
    assert command._in_use(group(workers, r1=["a"], r2=["a", "b"])) == expected


def test_slots_that_runs_wait_for_are_left_to_them() -> None:
    with pytest.raises(ClusterError, match=r"^the free slots are for runs that wait for them \(r1, r2\): check the"):
        command._in_use(group([("a", 2, 0)], "r1", "r2"))


class Stage:
    """Everything that a check of a cluster uses; it writes down what is done, and in which order."""

    bad: tuple[str, ...] = ()

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: Sequence[tuple[str, int, int]]) -> None:
        self.done: list[Any] = []
        self.run_ids: list[str] = []
        self.inbox, self.check = "inbox", "check"
        self.target = SimpleNamespace(foreign=True, name="dev", fixed=False)
        self.group = group(workers, r1=["a"])
        self.group.subscribe = lambda: self.done.append("subscribed")
        self.group.reserve = self.reserve
        cluster = SimpleNamespace(connect=lambda: self.target, worker_fault=lambda: "", last_words=lambda: "")
        monkeypatch.setattr(command, "_opened", lambda config, stack: cluster)
        monkeypatch.setattr(command, "connected", self.connected)
        monkeypatch.setattr(command, "WorkerGroup", self.worker_group)
        monkeypatch.setattr(command, "HostCheck", self.host_check)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        self.done.append("may be interrupted")
        yield
        self.done.append("not any more")

    @contextmanager
    def connected(self, target: Any, timeout_s: float, tell: Any) -> Iterator[str]:
        assert target is self.target and tell is print
        self.done.append(f"connected within {timeout_s:g} s")
        yield "client"
        self.done.append("disconnected")

    @contextmanager
    def worker_group(self, client: str, run_id: str, inbox: str, *, foreign: bool) -> Iterator[Any]:
        assert (client, inbox, foreign) == ("client", "inbox", True)
        self.run_ids.append(run_id)
        yield self.group
        self.done.append("released")

    def reserve(self, request: SlotRequest, hooks: Any) -> list[Any]:
        assert hooks.cluster == "dev"
        self.done.append(request)
        return [SimpleNamespace(slot=SimpleNamespace(host="a"))]

    def host_check(self, worker_group: Any, depth: Any, env: Any, check: Any, on_gpus: bool) -> Any:
        assert (worker_group, check) == (self.group, "check")
        self.done.append((depth.name, env, on_gpus))
        return self

    def run(self, places: list[Any], others: dict[str, tuple[str, ...]]) -> Any:
        self.done.append(([place.slot.host for place in places], others))
        return self

    def without_bad(self, report: Any, places: list[Any]) -> Any:
        assert report is self
        return f"without {self.bad} of {len(places)}"


def test_check_takes_all_slots_that_are_free_now_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stage: Any = Stage(monkeypatch, [("a", 2, 2), ("b", 2, 1)])
    config = ClusterConfig(start_timeout_s=7.0, wait_s=90.0)
    found: Any = command.check_cluster(config, "deep", {"A": "1"}, print, stage, exclude_bad=True)
    assert found is stage
    assert stage.done == [
        "may be interrupted",
        "connected within 7 s",
        "subscribed",
        SlotRequest(None, False, 7.0, 0.0, least=1),
        ("deep", {"A": "1"}, True),
        (["a"], {}),  # a slot of this host was released before the reservation
        "not any more",
        "released",
        "disconnected",
    ]
    (run_id,) = stage.run_ids
    assert run_id.startswith("check-") and len(run_id) == 14


def test_cluster_without_a_free_slot_is_reported_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    stage: Any = Stage(monkeypatch, [("a", 2, 2)])
    command.check_cluster(ClusterConfig(gpus=0), "quick", {}, print, stage, exclude_bad=False)
    assert stage.done[2:5] == ["subscribed", ("quick", {}, False), ([], {"a": ("r1",)})]


@pytest.mark.parametrize(("exclude_bad", "is_left_out"), [(True, True), (False, False)])
def test_bad_hosts_are_left_out_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, exclude_bad: bool, is_left_out: bool
) -> None:
    stage: Any = Stage(monkeypatch, [("a", 2, 0)])
    stage.bad = ("a",)
    found = command.check_cluster(ClusterConfig(), "quick", {}, print, stage, exclude_bad=exclude_bad)
    assert found == ("without ('a',) of 1" if is_left_out else stage)


def test_cluster_that_is_named_is_used_and_this_machine_is_checked_in_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []

    class Embedded:
        def __init__(self, ranks: int, gpus: Any, scratch: Path, environ: Any) -> None:
            made.append((ranks, gpus, scratch))

        def begin(self) -> None:
            made.append("begun")

        def close(self) -> None:
            made.append("closed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "EmbeddedCluster", Embedded)
    monkeypatch.setattr(command, "local_resources", lambda config, environ: SimpleNamespace(ranks=3, gpus=("0",)))
    with ExitStack() as stack:
        command._opened(ClusterConfig(), stack)
        ranks, gpus, scratch = made[0]
        assert (ranks, gpus, scratch.name, scratch.parent.parent) == (3, ("0",), "scratch", tmp_path)
        assert scratch.parent.name.startswith(".ddptrain-check-") and scratch.parent.is_dir() and made[1:] == ["begun"]
    assert made[2:] == ["closed"] and not list(tmp_path.iterdir())
    with ExitStack() as stack:
        assert isinstance(command._opened(ClusterConfig(address="tcp://10.0.0.1:8786"), stack), AttachedCluster)
    assert len(made) == 3


@pytest.mark.parametrize("foreign", [True, False])
def test_versions_are_compared_on_clusters_of_others(monkeypatch: pytest.MonkeyPatch, foreign: bool) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(command, "check_versions", lambda *given: checked.append(given))
    cluster: Any = SimpleNamespace(worker_fault=lambda: "f", last_words=lambda: "w")
    target: Any = SimpleNamespace(foreign=foreign, name="dev", fixed=True)
    hooks = command._hooks(SimpleNamespace(client="client"), cluster, target, print)  # type: ignore[arg-type]
    assert (hooks.worker_fault(), hooks.last_words(), hooks.cluster, hooks.fixed) == ("f", "w", "dev", True)
    assert (hooks.check is not None) is foreign
    if hooks.check is not None:
        hooks.check(["w1"])
        assert checked == [("client", ["w1"], command.Needs("ddptrain:", ()))]  # type: ignore[attr-defined]
