"""Before a training there must be as much free space as the last run used."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddptrain.errors import ClusterError, ExitCode
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.results.layout import RunLayout
from ddptrain.results.prune import PrunePolicy
from ddptrain.results.run_record import RunRecord
from ddptrain.retrain.cleanup.disk_space import check_space

KB = 1024


def put(runs: Path, run_id: str, day: int, size: int, status: str = "succeeded") -> None:
    layout = RunLayout(runs / run_id)
    layout.root.mkdir(parents=True)
    record = RunRecord(run_id=run_id, name="pets", status=status, started_at=f"2025-01-{day:02}T00:00:00.000Z")
    layout.run_json.write_text(record.to_json())
    (layout.root / "data").write_bytes(b"d" * (size - layout.run_json.stat().st_size))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A folder of runs (10 and 20 kB, oldest first), and a registry with a version of 8 kB; in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "runs", "pets-1", 1, 10 * KB)
    put(tmp_path / "runs", "pets-2", 2, 20 * KB)
    registry = ModelRegistry.open("models")
    registry.add_version("names", {"w": b"w" * 8 * KB}, VersionRecord("", 0, "", "pets-2", "petnames", 1, {}, ()))
    return "runs", "models"


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))


def test_as_much_as_the_last_run_is_enough(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs, models = place
    free(monkeypatch, 20 * KB)
    check_space(runs, "pets", models)
    free(monkeypatch, 28 * KB)
    check_space(runs, "pets", models, "names")
    free(monkeypatch, 0)
    check_space(runs, "dogs", models)  # its first run


def test_less_is_an_error_that_says_what_prune_would_free(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, models = place
    free(monkeypatch, 20 * KB - 1)
    with pytest.raises(ClusterError) as caught:
        check_space(runs, "pets", models, policy=PrunePolicy(keep=1))
    assert caught.value.exit_code == ExitCode.CLUSTER
    assert str(caught.value) == (
        "not enough disk space in runs: 20.0 KiB are free, but the last run, pets-2, used 20.0 KiB; "
        "`ddptrain results prune --keep 1 --failed-keep 5` frees 10.0 KiB (1 run)"
    )
    with pytest.raises(ClusterError, match="prune --keep 1 --failed-keep 5 --name pets` frees 10"):
        check_space(runs, "pets", models, policy=PrunePolicy(keep=1, name="pets"))
    with pytest.raises(ClusterError, match="--keep 20 --failed-keep 5` would free nothing: keep fewer runs"):
        check_space(runs, "pets", models)


def test_run_and_version_on_one_file_system_need_their_sum(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 28 * KB - 1)
    with pytest.raises(ClusterError, match=r"pets-2, used 20\.0 KiB, and version 1 of names has 8\.0 KiB; "):
        check_space(place[0], "pets", place[1], "names")


def test_champions_run_is_not_counted_as_free(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs, models = place
    registry = ModelRegistry.open(models)
    version = registry.add_version("old", {"w": b"w"}, VersionRecord("", 0, "", "pets-1", "petnames", 1, {}, ()))
    registry.promote("old", version.version)
    free(monkeypatch, 0)
    with pytest.raises(ClusterError, match="would free nothing"):
        check_space(runs, "pets", models, policy=PrunePolicy(keep=1))


def test_last_successful_run_counts_and_a_failed_one_only_without_it(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(Path("runs"), "pets-3", 3, 2 * KB, "failed")
    free(monkeypatch, 19 * KB)
    with pytest.raises(ClusterError, match="pets-2, used 20"):
        check_space(place[0], "pets", place[1])
    shutil.rmtree("runs/pets-1")
    shutil.rmtree("runs/pets-2")
    check_space(place[0], "pets", place[1])
    free(monkeypatch, KB)
    with pytest.raises(ClusterError, match=r"pets-3, used 2\.0 KiB"):
        check_space(place[0], "pets", place[1])


def test_what_a_resumed_run_has_already_is_not_needed_again(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(Path("runs"), "pets-3", 3, 15 * KB, "failed")
    free(monkeypatch, 5 * KB)
    check_space(place[0], "pets", place[1], resumed="pets-3")
    free(monkeypatch, 5 * KB - 1)
    with pytest.raises(ClusterError, match=r"run pets-3, which continues, has 15\.0 KiB of it"):
        check_space(place[0], "pets", place[1], resumed="pets-3")


def test_stores_and_missing_folders_are_not_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, 0)
    check_space("s3://bucket/runs", "pets", "s3://bucket/models", "names")
    check_space("runs", "pets", "models", "names")
    assert list(tmp_path.iterdir()) == []
