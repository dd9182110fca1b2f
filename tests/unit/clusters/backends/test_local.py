"""What a cluster on this machine is made of; its processes are in tests/integration/test_cluster.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ddptrain.clusters import cluster_records, processes
from ddptrain.clusters.backends import local
from ddptrain.clusters.backends.local import LocalProvider
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.processes import DaemonId, DaemonOrder
from ddptrain.clusters.security import make_tls
from ddptrain.config.sections.clusters import ClusterConfig, RankRange
from ddptrain.errors import ClusterError


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[DaemonOrder]:
    """What would be started, on a machine with four GPUs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(local, "visible_gpus", lambda environ: ("0", "1", "2", "3"))
    ordered: list[DaemonOrder] = []

    def start(order: DaemonOrder) -> DaemonId:
        ordered.append(order)
        return DaemonId(order.name, os.getpid(), 0.0, order.folder)

    monkeypatch.setattr(processes, "start", start)
    return ordered


def deployment(**settings: Any) -> Deployment:
    config = ClusterConfig(**settings)
    record = ClusterRecord("dev", "local", "2026-01-01T00:00:00+00:00", settings=config.model_dump(mode="json"))
    return cluster_records.create(record)


def started(orders: list[DaemonOrder], cluster: Deployment) -> dict[str, str]:
    """The worker's options."""
    LocalProvider().scale(cluster, None, print)
    worker = next(order for order in orders if order.name == "worker")
    return dict(zip(worker.argv[2::2], worker.argv[3::2], strict=True))


@pytest.mark.parametrize(
    ("settings", "slots", "gpus"),
    [
        ({}, "4", "0,1,2,3"),
        ({"ranks": 2}, "2", "0,1,2,3"),  # so that it can grow
        ({"gpus": 2}, "2", "0,1"),
        ({"gpus": 0, "ranks": 7}, "7", "none"),
        ({"ranks": RankRange(min=2, max=3)}, "3", "0,1,2,3"),
        ({"ranks": RankRange(min=2, max=16)}, "4", "0,1,2,3"),
        ({"gpus": 0, "ranks": RankRange(min=2, max=16)}, "16", "none"),
    ],
)
def test_slots_are_one_per_gpu_or_as_asked(
    orders: list[DaemonOrder], settings: dict[str, Any], slots: str, gpus: str
) -> None:
    options = started(orders, deployment(**settings))
    assert (options["--slots"], options["--gpus"]) == (slots, gpus)


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"gpus": 5}, "cluster.gpus is 5, but this machine has 4"), ({"ranks": 5}, "5 slots .* there are 4 GPUs")],
)
def test_more_than_the_machine_has_is_refused_before_anything_starts(
    orders: list[DaemonOrder], settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ClusterError, match=error):
        LocalProvider().scale(deployment(**settings), None, print)
    assert orders == []


def test_worker_starts_before_the_scheduler_and_both_are_noted(orders: list[DaemonOrder]) -> None:
    cluster = deployment()
    options = started(orders, cluster)
    assert [order.name for order in orders] == list(cluster.record.parts) == ["worker", "scheduler"]
    assert "--host" not in options and "--tls-dir" not in options, "unix sockets"


def test_certificate_is_handed_to_the_worker(orders: list[DaemonOrder]) -> None:
    cluster = deployment()
    make_tls(cluster.folder)
    assert started(orders, cluster)["--tls-dir"] == str(cluster.folder)
