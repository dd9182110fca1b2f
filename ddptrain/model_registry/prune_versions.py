"""Deletes old versions of a model."""

from __future__ import annotations

from dataclasses import dataclass

from ddptrain.errors import UsageError
from ddptrain.model_registry.model_reader import ModelState
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry


@dataclass(frozen=True, slots=True)
class VersionsReport:
    """Which versions were deleted, or would be if `dry_run`; which stay, each with the reason; bytes that are freed."""

    model: str
    removed: tuple[int, ...]
    kept: dict[int, str]
    freed_bytes: int
    dry_run: bool


def prune_versions(registry: ModelRegistry, model: str, keep: int, *, dry_run: bool = False) -> VersionsReport:
    """Delete all but the newest `keep` versions of a model.

    Versions with an alias (champion, previous, or a user's) and pinned versions stay as well, also if they get it at
    this moment. What a killed process had begun to delete, or to write a day ago, is deleted too.

    Raises StoreError if the registry cannot be read or written; RegistryDamaged.
    """
    state = registry.state(model)
    versions = [record for record in registry.versions(model) if record.version not in state.removed]
    kept = reasons_to_stay(versions, state, keep)
    doomed = [record for record in versions if record.version not in kept]
    removed = []
    for record in doomed:
        try:
            if not dry_run:
                registry.remove(model, record.version, reason=f"{keep} newer versions")
            removed.append(record)
        except UsageError:  # another process has just pinned or promoted it, or given it an alias
            kept[record.version] = "in use"
    if not dry_run:
        registry.delete_leftovers(model)
    numbers = tuple(record.version for record in removed)
    return VersionsReport(model, numbers, kept, sum(record.size_bytes for record in removed), dry_run)


def reasons_to_stay(versions: list[VersionRecord], state: ModelState, keep: int) -> dict[int, str]:
    """Return the versions that stay, each with the reason. `versions`: oldest first."""
    newest = {record.version for record in versions[max(0, len(versions) - keep) :]}
    kept = {}
    for record in versions:
        if aliases := state.aliases_of(record.version):
            kept[record.version] = ", ".join(aliases)
        elif record.version in state.pinned:
            kept[record.version] = "pinned"
        elif record.version in newest:
            kept[record.version] = f"one of the {keep} newest"
    return kept
