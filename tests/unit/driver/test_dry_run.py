"""`--dry-run` finds out what would keep the run from beginning, without starting anything."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.cli.main import main
from ddptrain.clusters import cluster_records
from ddptrain.clusters.cluster_records import ClusterRecord
from ddptrain.host_identity import HostId


@pytest.fixture(autouse=True)
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
    capsys: pytest.CaptureFixture[str], dead_address: str
) -> None:
    record = ClusterRecord("dev", "local", "2026-01-01T00:00:00+00:00", address=f"tcp://{dead_address}")
    made = cluster_records.create(record)
    code, out, err = dry_run(capsys, "--cluster", "dev")
    assert (code, out) == (4, "") and "the cluster dev does not answer at" in err
    made.update(host=HostId("login2", "m", "b", "p"))
    code, out, err = dry_run(capsys, "--cluster", "dev")
    assert (code, out) == (4, "") and "runs on the host login2" in err


def test_address_where_nobody_listens_is_told_long_before_the_cluster_must_have_started(
    capsys: pytest.CaptureFixture[str], dead_address: str
) -> None:
    code, out, err = dry_run(capsys, "--cluster", dead_address, "--set", "cluster.start_timeout_s=600")
    assert (code, out) == (4, "") and f"no Dask scheduler answers at tcp://{dead_address} within 5 s" in err


def test_machine_without_the_gpus_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.driver.local_resources.visible_gpus", lambda environ: ())
    code, out, err = dry_run(capsys, "--set", "cluster.gpus=2")
    assert (code, out) == (4, "") and "cluster.gpus is 2, but this machine offers 0" in err


def test_what_is_there_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dry_run(capsys, "--set", "cluster.gpus=0")
    assert (code, err) == (0, "") and "workload: petnames" in out
