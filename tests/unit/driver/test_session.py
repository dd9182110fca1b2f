"""Which cluster a configuration leads to, and what a run may do to one that it shares."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters.backends.attached import AttachedCluster
from ddptrain.clusters.backends.embedded import EmbeddedCluster
from ddptrain.clusters.backends.per_run import RunCluster
from ddptrain.config.load import load_mapping
from ddptrain.driver import session
from ddptrain.driver.session import SharedCluster, cluster_for
from tests.unit.notes import Notes


def config(**fields: Any) -> Any:
    return load_mapping({"workload": "petnames", **fields}, Path("/project")).config


@pytest.mark.parametrize(("workload", "taken"), [("petnames", True), ("mine:train", False)])
def test_embedded_cluster_gets_the_resources_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, workload: str, taken: bool
) -> None:
    """The processes of a built-in workload import nothing from the folder that the user is in."""
    monkeypatch.setattr(session, "without_working_directory", lambda environ: {"safe": "1"})
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "."})
    seen: list[Any] = []
    monkeypatch.setattr(EmbeddedCluster, "__init__", lambda self, *arguments: seen.extend(arguments))
    machine: Any = SimpleNamespace(ranks=2, gpus="gpus")
    made = cluster_for(config(workload=workload), machine, Path("/scratch"), print)
    assert isinstance(made, EmbeddedCluster)
    assert seen == [2, "gpus", Path("/scratch"), {"safe": "1"} if taken else {"PYTHONPATH": "."}]


def test_other_clusters_are_attached_or_started_for_the_run() -> None:
    attached = cluster_for(config(cluster={"address": "tcp://h:1"}), None, Path("/scratch"), print)
    assert isinstance(attached, AttachedCluster)
    started = cluster_for(config(cluster={"backend": "local"}), None, Path("/scratch"), print)
    assert isinstance(started, RunCluster)


def test_shared_cluster_is_neither_started_nor_closed_by_a_run() -> None:
    notes: list[tuple[Any, ...]] = []
    inner: Any = Notes(notes, "inner", words="warm", worker_fault=lambda: "ended", last_words=lambda: "lines")
    target: Any = SimpleNamespace(address="tcp://h:1")
    shared = SharedCluster(inner, target)
    shared.begin()
    shared.close()
    assert notes == [] and shared.connect() is target and shared.words == "warm"
    assert (shared.worker_fault(), shared.last_words()) == ("ended", "lines")
    notes.clear()
    for leaving in (True, False):
        shared.mend(leaving=leaving)
    assert notes == [("inner.mend", {"leaving": False})] * 2
