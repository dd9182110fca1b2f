"""Old versions of a model are deleted; those in use stay, and a killed deletion is finished."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddptrain.errors import UsageError
from ddptrain.model_registry import registry as registry_module
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import RECORD, ModelRegistry
from ddptrain.retrain.clean_up import CleanUpReport, clean_up

WEIGHTS = b"w" * 500


def pruned(registry: ModelRegistry, keep: int) -> CleanUpReport:
    return clean_up(registry, "names", keep, f"{registry.where}/no-runs", "names")


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    """Six versions: 1 and 2 have an alias, 3 is the previous champion, 4 the champion."""
    registry = ModelRegistry.open(str(tmp_path / "models"))
    for number in range(1, 7):
        record = VersionRecord("", 0, "", f"run-{number}", "petnames", 1, {}, ())
        assert registry.add_version("names", {"a/weights": WEIGHTS, "run.json": b"{}"}, record).version == number
    registry.set_alias("names", "night", 1)
    registry.set_alias("names", "staging", 2)
    registry.promote("names", 3)
    registry.promote("names", 4)
    return registry


def numbers(registry: ModelRegistry) -> list[int]:
    return [version.version for version in registry.versions("names")]


@pytest.mark.parametrize(("keep", "removed"), [(0, (5, 6)), (1, (5,)), (2, ()), (10, ())])
def test_newest_versions_and_those_in_use_stay(registry: ModelRegistry, keep: int, removed: tuple[int, ...]) -> None:
    report = pruned(registry, keep)
    assert (report.versions, report.freed_bytes) == (removed, 502 * len(removed))
    assert numbers(registry) == [number for number in range(1, 7) if number not in removed]
    for version in registry.versions("names"):
        registry.verify(version)


def test_model_without_versions_has_nothing_to_delete(tmp_path: Path) -> None:
    report = pruned(ModelRegistry.open(str(tmp_path / "models")), 3)
    assert report.versions == report.kept == () and not (tmp_path / "models").exists()


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_deletion_that_was_killed_is_finished(
    registry: ModelRegistry, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = OwnFolder.remove, 0

    def die(store: OwnFolder, key: str) -> None:
        nonlocal count
        count += 1
        if count == left:
            raise KeyboardInterrupt
        real(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(OwnFolder, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            pruned(registry, 1)
    folder = registry._version_folder("names", 5)
    assert folder.files() and (folder.read(RECORD) is None) == (left > 1)
    with pytest.raises(UsageError, match="no version 5"):  # whether its record is still there or not
        registry.promote("names", 5)
    changes = registry.state("names").number
    assert pruned(registry, 1).versions == ()
    assert folder.files() == {} and numbers(registry) == [1, 2, 3, 4, 6]
    assert registry.state("names").number == changes  # it is removed once in the history
    assert registry.state("names").removed == (5,)


def test_files_of_a_version_that_was_never_complete_are_deleted_a_day_later(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(registry_module, "utc_now", lambda: (_ for _ in ()).throw(KeyboardInterrupt))  # killed here
        with pytest.raises(KeyboardInterrupt):
            registry.add_version("names", {"weights": WEIGHTS}, VersionRecord("", 0, "", "r", "petnames", 1, {}, ()))
    folder = registry._version_folder("names", 7)
    assert set(folder.files()) == {"claim.json", "weights"}
    where = Path(registry.where) / "names/versions/7"
    (where / ".more-weights.1a2b.tmp").write_bytes(WEIGHTS)
    pruned(registry, 10)
    assert set(folder.files()) == {"claim.json", "weights"}  # another process may still be writing it
    tomorrow = time.time() + 25 * 3600
    monkeypatch.setattr(registry_module, "time", SimpleNamespace(time=lambda: tomorrow))
    pruned(registry, 10)
    assert not where.exists() and numbers(registry) == [1, 2, 3, 4, 5, 6]


def test_version_that_is_promoted_at_the_same_moment_stays_complete(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModelRegistry.versions
    versions: list[VersionRecord] = []

    def promote_after_listing(self: ModelRegistry, model: str) -> list[VersionRecord]:
        found = real(self, model)
        if not versions:
            versions.extend(found)
            self.promote("names", 5)
        return found

    monkeypatch.setattr(ModelRegistry, "versions", promote_after_listing)
    report = pruned(registry, 1)
    assert report.versions == () and 5 in report.kept
    registry.verify(registry.version("names", 5))


def test_version_that_is_being_removed_cannot_be_promoted_or_named(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = registry.version("names", 5)
    registry.remove("names", 5)
    # The others have read version.json before it was deleted.
    monkeypatch.setattr(ModelRegistry, "version", lambda self, model, number: record)
    monkeypatch.setattr(ModelRegistry, "verify", lambda self, record: None)
    with pytest.raises(UsageError, match="model names has no version 5 any more: it was removed"):
        registry.promote("names", 5)
    with pytest.raises(UsageError, match="no version 5 any more"):
        registry.set_alias("names", "night", 5)
    assert registry.state("names").version_of("champion") == 4
