"""Which cluster a configuration leads to, what a run may do to one that it shares, and what a dry run finds out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.cli.main import main
from ddptrain.clusters import record as records
from ddptrain.clusters.backends.run_cluster import AttachedCluster, RunCluster
from ddptrain.clusters.record import ClusterRecord
from ddptrain.config.load import load_mapping
from ddptrain.driver.cluster_session import SharedCluster, cluster_for
from ddptrain.host_identity import HostId
from tests.unit.notes import Notes


def config(**fields: Any) -> Any:
    return load_mapping({"workload": "petnames", **fields}, Path("/project")).config


def test_other_clusters_are_attached_or_started_for_the_run() -> None:
    attached = cluster_for(config(cluster={"address": "tcp://h:1"}), None, Path("/scratch"), print)
    assert isinstance(attached, AttachedCluster)
    started = cluster_for(config(cluster={"backend": "local"}), None, Path("/scratch"), print)
    assert isinstance(started, RunCluster)


def test_shared_cluster_is_neither_started_nor_closed_by_a_run() -> None:
    notes: list[tuple[Any, ...]] = []
    inner: Any = Notes(notes, "inner", description="warm", worker_fault=lambda: "ended", last_words=lambda: "lines")
    target: Any = SimpleNamespace(address="tcp://h:1")
    shared = SharedCluster(inner, target)
    shared.begin()
    shared.close()
    assert notes == [] and shared.connect() is target and shared.description == "warm"
    assert (shared.worker_fault(), shared.last_words()) == ("ended", "lines")
    notes.clear()
    for leaving in (True, False):
        shared.replace_workers(leaving=leaving)
    assert notes == [("inner.replace_workers", {"leaving": False})] * 2


# --- `--dry-run` finds out what would keep the run from beginning, without starting anything ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dead_address() -> Iterator[str]:
    """Nobody listens there, nor can while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def dry_run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["train", "petnames", "--dry-run", *options])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_cluster_that_is_not_there_is_the_error_that_the_run_would_have(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, out, err = dry_run(capsys, "--cluster", "nothere")
    assert (code, out) == (2, "") and 'there is no cluster "nothere"' in err
    assert not (folder / "runs").exists()


def test_cluster_whose_scheduler_is_gone_or_elsewhere_is_told(
    capsys: pytest.CaptureFixture[str], folder: Path, dead_address: str
) -> None:
    made = records.create(ClusterRecord(name="dev", address=f"tcp://{dead_address}"))
    code, out, err = dry_run(capsys, "--cluster", "dev")
    assert (code, out) == (4, "") and "the cluster dev does not answer at" in err
    made.host = HostId("login2", "m", "b", "p")
    made.save()
    code, out, err = dry_run(capsys, "--cluster", "dev")
    assert (code, out) == (4, "") and "runs on the host login2" in err


@pytest.mark.usefixtures("folder")
def test_what_is_there_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dry_run(capsys, "--set", "cluster.gpus=0")
    assert (code, err) == (0, "") and "workload: petnames" in out
