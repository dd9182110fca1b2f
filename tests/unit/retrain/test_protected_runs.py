"""The runs of versions in use, and of an unfinished retraining, are protected from cleanups."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ddptrain.model_registry.records import RegistryDamaged, VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainRecords, RetrainStatus, Stage
from ddptrain.retrain.clean_up import protected_runs


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    registry = ModelRegistry.open(str(tmp_path / "models"))
    for number in range(1, 6):
        record = VersionRecord("", 0, "", f"run-{number}", "petnames", 1, {}, ())
        registry.add_version("names", {"weights": b"w"}, record)
    return registry


def put(registry: ModelRegistry, run_id: str, status: RetrainStatus, **fields: object) -> None:
    records = RetrainRecords(registry.folder, "names")
    made = records.create(RetrainRecord(0, "names", "2025-01-01T00:00:00Z", run_id))
    records.update(dataclasses.replace(made, status=status, **fields))  # type: ignore[arg-type]


def test_runs_of_versions_with_an_alias_or_a_pin_are_protected(registry: ModelRegistry) -> None:
    assert protected_runs(registry) == {}
    registry.promote("names", 1)
    registry.promote("names", 2)
    registry.set_alias("names", "staging", 3)
    registry.pin("names", 3, pinned=True)
    registry.pin("names", 4, pinned=True)
    assert protected_runs(registry) == {
        "run-1": "previous of names",
        "run-2": "champion of names",
        "run-3": "staging, pinned of names",
        "run-4": "pinned of names",
    }


@pytest.mark.parametrize("status", list(RetrainStatus))
def test_run_of_an_unfinished_retraining_is_protected(registry: ModelRegistry, status: RetrainStatus) -> None:
    put(registry, "night", status)
    continues = status in {"running", "deadline", "interrupted"}
    assert protected_runs(registry) == ({"night": "retraining 1 of names is not finished"} if continues else {})


def test_run_that_failed_after_its_training_is_protected_until_another_retraining(registry: ModelRegistry) -> None:
    put(registry, "trained", RetrainStatus.FAILED, stage=Stage.TRAIN, exit_code=1)
    assert protected_runs(registry).keys() == {"trained"}
    put(registry, "given-up", RetrainStatus.ABANDONED)
    assert protected_runs(registry).keys() == {"trained"}
    put(registry, "newer", RetrainStatus.PROMOTED)
    assert protected_runs(registry) == {}


def test_runs_of_all_running_retrainings_are_protected(registry: ModelRegistry) -> None:
    put(registry, "one", RetrainStatus.RUNNING)
    put(registry, "two", RetrainStatus.RUNNING)
    put(registry, "done", RetrainStatus.REJECTED)
    assert protected_runs(registry).keys() == {"one", "two"}


def test_damaged_registry_is_an_error_so_that_nothing_is_deleted(registry: ModelRegistry, tmp_path: Path) -> None:
    registry.promote("names", 1)
    for file in (tmp_path / "models/names/history").iterdir():
        file.write_text("{")
    with pytest.raises(RegistryDamaged, match="is damaged"):
        protected_runs(registry)


def test_no_registry_protects_nothing(tmp_path: Path) -> None:
    assert protected_runs(ModelRegistry.open(str(tmp_path / "none"))) == {}
