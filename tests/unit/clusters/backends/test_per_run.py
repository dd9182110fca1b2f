"""A cluster for one run: what it is called, how long it stays without a run, and its end."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters import lifecycle, resolve
from ddptrain.clusters.backends.per_run import RunCluster
from ddptrain.clusters.resolve import Target
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.errors import ClusterError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []

    def up(config: ClusterConfig, name: str, tell: Any) -> Any:
        made.append(("up", config.idle_timeout_s, name))
        return SimpleNamespace(deployment="d")

    def down(name: str, tell: Any, *, now: bool) -> None:
        made.append(("down", name, now))

    monkeypatch.setattr(lifecycle, "up", up)
    monkeypatch.setattr(lifecycle, "down", down)
    monkeypatch.setattr(lifecycle, "last_words", lambda name: f"last words of {name}")
    monkeypatch.setattr(resolve, "of_deployment", lambda deployment: Target(f"tcp://{deployment}"))
    return made


@pytest.mark.parametrize(("idle_timeout_s", "expected"), [(0.0, 300.0), (60.0, 60.0)])
def test_cluster_of_a_run_is_started_and_ended_with_it(
    calls: list[tuple[Any, ...]], idle_timeout_s: float, expected: float
) -> None:
    told: list[str] = []
    cluster = RunCluster(ClusterConfig(backend="slurm", idle_timeout_s=idle_timeout_s), told.append)
    assert re.fullmatch("run-[0-9a-f]{8}", cluster.name) and cluster.description == "a cluster of backend slurm"
    cluster.begin()
    cluster.replace_workers(leaving=True)
    cluster.close()
    assert calls == [] and cluster.worker_fault() is None
    assert cluster.connect() == Target("tcp://d") and told == ["starting a cluster of backend slurm"]
    assert cluster.last_words() == f"last words of {cluster.name}"
    cluster.close()
    assert calls == [("up", expected, cluster.name), ("down", cluster.name, True)] and len(told) == 1


def test_part_that_does_not_end_is_told_with_what_to_do(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object, now: bool) -> None:
        raise ClusterError("b may still run")

    told: list[str] = []
    cluster = RunCluster(ClusterConfig(backend="slurm"), told.append)
    cluster.connect()
    monkeypatch.setattr(lifecycle, "down", down)
    cluster.close()
    assert told[1:] == [f"b may still run; try again with `ddptrain cluster down {cluster.name}`"]
