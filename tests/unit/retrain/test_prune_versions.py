"""Old versions of a model are deleted; those in use stay, and a killed deletion is finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.model_registry.model_reader import RECORD
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.retrain.clean_up import prune_versions
from ddptrain.storage.remote_folder import RemoteFolder

WEIGHTS = b"w" * 500


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    """Six versions: 1 is pinned, 2 has an alias, 3 is the previous champion, 4 the champion."""
    registry = ModelRegistry.open(str(tmp_path / "models"))
    for number in range(1, 7):
        record = VersionRecord("", 0, "", f"run-{number}", "petnames", 1, {}, ())
        assert registry.add_version("names", {"a/weights": WEIGHTS, "run.json": b"{}"}, record).version == number
    registry.pin("names", 1, pinned=True)
    registry.set_alias("names", "staging", 2)
    registry.promote("names", 3)
    registry.promote("names", 4)
    return registry


def numbers(registry: ModelRegistry) -> list[int]:
    return [version.version for version in registry.versions("names")]


@pytest.mark.parametrize(("keep", "removed"), [(0, (5, 6)), (1, (5,)), (2, ()), (10, ())])
def test_newest_versions_and_those_in_use_stay(registry: ModelRegistry, keep: int, removed: tuple[int, ...]) -> None:
    report = prune_versions(registry, "names", keep)
    assert (report.removed, report.freed_bytes) == (removed, 502 * len(removed))
    assert numbers(registry) == [number for number in range(1, 7) if number not in removed]
    assert {number: report.kept[number] for number in (1, 2, 3, 4)} == {
        1: "pinned",
        2: "staging",
        3: "previous",
        4: "champion",
    }
    for version in registry.versions("names"):
        registry.verify(version)


def test_model_without_versions_has_nothing_to_delete(tmp_path: Path) -> None:
    report = prune_versions(ModelRegistry.open(str(tmp_path / "models")), "names", 3)
    assert report.removed == () and report.kept == {} and not (tmp_path / "models").exists()


class Dying(OwnFolder):
    """A folder whose process is killed when it deletes its `left`th file."""

    left = 0

    def delete(self, key: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        super().delete(key)


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_deletion_that_was_killed_is_finished(registry: ModelRegistry, left: int) -> None:
    dying = Dying(Path(registry.where))
    dying.left = left
    with pytest.raises(KeyboardInterrupt):
        prune_versions(ModelRegistry(RemoteFolder(dying)), "names", 1)
    folder = registry.folder.below("names/versions/5")
    assert folder.files() and (folder.read(RECORD) is None) == (left > 1)
    with pytest.raises(UsageError, match="no version 5"):  # whether its record is still there or not
        registry.promote("names", 5)
    changes = registry.state("names").number
    assert prune_versions(registry, "names", 1).removed == ()
    assert folder.files() == {} and numbers(registry) == [1, 2, 3, 4, 6]
    assert registry.state("names").number == changes  # it is removed once in the history
    assert registry.state("names").removed == (5,)


class Racing(ModelRegistry):
    """One whose caller lists the versions just before another process promotes the fifth."""

    raced = False

    def versions(self, model: str) -> list[VersionRecord]:
        found = super().versions(model)
        if not self.raced:
            self.raced = True
            self.promote("names", 5)
        return found


def test_version_that_is_promoted_at_the_same_moment_stays_complete(registry: ModelRegistry) -> None:
    report = prune_versions(Racing.open(registry.where), "names", 1)
    assert report.removed == () and report.kept[5] == "in use"
    registry.verify(registry.version("names", 5))


def test_version_that_was_removed_cannot_be_promoted_pinned_or_named(registry: ModelRegistry) -> None:
    registry.remove("names", 5)
    with pytest.raises(UsageError, match="no version 5"):
        registry.promote("names", 5)
    with pytest.raises(UsageError, match="no version 5"):
        registry.pin("names", 5, pinned=True)
    with pytest.raises(UsageError, match="no version 5"):
        registry.set_alias("names", "night", 5)
    assert registry.state("names").version_of("champion") == 4
