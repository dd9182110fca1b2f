"""The clean-up after a retraining: old versions of its model, then old runs of its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddptrain.config.wording import counted
from ddptrain.errors import UsageError
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.model_registry.retrainings import RetrainRecords
from ddptrain.results.prune import PrunePolicy, PruneReport, prune
from ddptrain.results.runs import open_runs_dir
from ddptrain.results.show.render import size
from ddptrain.retrain.decisions import to_continue

_LOOKED_AT = 50  # retrainings of each model


@dataclass(frozen=True, slots=True)
class CleanUpReport:
    """What a clean-up has deleted: versions, and runs; kept: the versions that stay."""

    versions: tuple[int, ...]
    kept: tuple[int, ...]
    runs: PruneReport
    freed_bytes: int

    @property
    def summary(self) -> str:
        """One line, as "1 version and 2 runs deleted, 41.2 MiB freed"."""
        versions, runs = counted(len(self.versions), "version"), counted(len(self.runs.removed), "run")
        problems = f"; {counted(len(self.runs.problems), 'problem')}" if self.runs.problems else ""
        return f"{versions} and {runs} deleted, {size(self.freed_bytes)} freed{problems}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "versions": list(self.versions),
            "runs": [decision.run.folder for decision in self.runs.removed],
            "freed_bytes": self.freed_bytes,
            "problems": list(self.runs.problems),
        }


def clean_up(registry: ModelRegistry, model: str, keep: int, runs_dir: str, name: str) -> CleanUpReport:
    """Delete the versions of a model, and the runs of a name, that `retrain.keep` does not keep.

    Versions with an alias (champion, previous, or a user's) stay, also if they get it at this moment, and runs that
    other models use. What a killed process had begun to delete, or to write a day ago, is deleted too. A run that
    cannot be deleted is one of the problems of the report.

    Raises StoreError, RegistryDamaged or UsageError if registry or runs cannot be read or written.
    """
    state = registry.state(model)
    versions = [record for record in registry.versions(model) if record.version not in state.removed]
    old = [record for record in versions[: max(0, len(versions) - keep)] if not state.aliases_of(record.version)]
    removed = []
    for record in old:
        try:
            registry.remove(model, record.version, reason=f"{keep} newer versions")
            removed.append(record)
        except UsageError:  # another process has just promoted it, or given it an alias
            continue
    registry.delete_leftovers(model)
    policy = PrunePolicy(keep=2 * keep, failed_keep=keep // 2, name=name)
    runs = prune(open_runs_dir(runs_dir), policy, protected_runs(registry))
    kept = tuple(record.version for record in versions if record not in removed)
    freed_bytes = sum(record.size_bytes for record in removed) + runs.freed_bytes
    return CleanUpReport(tuple(record.version for record in removed), kept, runs, freed_bytes)


def protected_runs(registry: ModelRegistry) -> dict[str, str]:
    """Return the runs that must stay: run id -> the reason, as "champion of petnames".

    These are the runs of versions with an alias, and the runs that an unfinished retraining continues.

    Raises StoreError or RegistryDamaged if that cannot be read: then nothing may be deleted.
    """
    reasons: dict[str, str] = {}
    for model in registry.begun():
        state = registry.state(model)
        for record in registry.versions(model):
            if roles := state.aliases_of(record.version):
                reasons[record.run_id] = f"{', '.join(roles)} of {model}"
        newest = RetrainRecords(registry.folder, model).newest(_LOOKED_AT)
        continued = to_continue(newest)
        for each in newest:
            if each.run_id and (each.is_running or each is continued):
                reasons.setdefault(each.run_id, f"retraining {each.number} of {model} is not finished")
    return reasons
