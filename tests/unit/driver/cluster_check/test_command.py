"""The check of a cluster by itself: which slots it may take, and which cluster it opens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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


def test_check_takes_all_slots_that_are_free_now() -> None:
    config = ClusterConfig(start_timeout_s=7.0, wait_s=90.0)
    assert command._wish(config) == SlotRequest(None, False, 7.0, 0.0, least=1)


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
