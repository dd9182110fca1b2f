"""The cluster of a run, and what this machine offers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddptrain.cli.main import main
from ddptrain.clusters import machine_slots as local_resources
from ddptrain.clusters import record as records
from ddptrain.clusters.machine_slots import LocalResources
from ddptrain.clusters.record import ClusterRecord
from ddptrain.config.load import load_mapping
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.errors import ClusterError
from ddptrain.host_identity import HostId

# --- Which cluster a configuration leads to, what a run may do to one that it shares, and what a dry run ---


def config(**fields: Any) -> Any:
    return load_mapping({"workload": "petnames", **fields}, Path("/project")).config


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


# --- How many ranks a machine gets, and on which GPUs ---


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(environ: Mapping[str, str]) -> tuple[str, ...]:
        return ("0", "1", "2", "3")

    monkeypatch.setattr(local_resources, "visible_gpus", visible)


@pytest.mark.usefixtures("four_gpus")
def test_more_ranks_than_gpus_are_refused_with_the_way_out() -> None:
    with pytest.raises(ClusterError, match=r"cluster\.ranks is 5, but there are 4 GPUs.*cluster\.gpus to 0"):
        local_resources.local_resources(ClusterConfig(ranks=5), {})


def test_machine_without_gpus_gets_at_least_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.gpus.usable_cores", lambda: 2)
    assert local_resources.local_resources(ClusterConfig(), {"CUDA_VISIBLE_DEVICES": ""}) == LocalResources(2, ())
    monkeypatch.setattr("ddptrain.gpus.usable_cores", lambda: 16)
    assert local_resources.local_resources(ClusterConfig(), {"CUDA_VISIBLE_DEVICES": ""}) == LocalResources(8, ())


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LocalResources(4, ("0", "1", "2", "3"))),
        ({"ranks": 2}, LocalResources(2, ("0", "1"))),
        ({"gpus": 0, "ranks": 6}, LocalResources(6, ())),
        ({"gpus": 3}, LocalResources(3, ("0", "1", "2"))),
        ({"ranks": 4}, LocalResources(4, ("0", "1", "2", "3"))),
        ({"ranks": {"min": 1, "max": 3}}, LocalResources(3, ("0", "1", "2"))),
        ({"ranks": {"min": 1, "max": 9}}, LocalResources(4, ("0", "1", "2", "3"))),
        ({"ranks": {"min": 1, "max": 9}, "gpus": 0}, LocalResources(9, ())),
    ],
)
def test_ranks_and_gpus_of_a_setting(settings: dict[str, Any], expected: LocalResources) -> None:
    assert local_resources.local_resources(ClusterConfig.model_validate(settings), {}) == expected
