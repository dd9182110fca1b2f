"""The clean-up after a retraining: old versions of its model, then old runs of its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddptrain.config.sections.retraining import KeepConfig
from ddptrain.config.wording import counted
from ddptrain.model_registry.prune_versions import VersionsReport, prune_versions
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.results.prune.policy import PrunePolicy
from ddptrain.results.prune.prune import PruneReport, prune
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.results.show.render import size
from ddptrain.retrain.cleanup.protected_runs import protected_runs


@dataclass(frozen=True, slots=True)
class CleanUpReport:
    """What a clean-up has deleted."""

    versions: VersionsReport
    runs: PruneReport

    @property
    def freed_bytes(self) -> int:
        """Bytes that were freed."""
        return self.versions.freed_bytes + self.runs.freed_bytes

    @property
    def summary(self) -> str:
        """One line, as "1 version and 2 runs deleted, 41.2 MiB freed"."""
        versions, runs = counted(len(self.versions.removed), "version"), counted(len(self.runs.removed), "run")
        problems = f"; {counted(len(self.runs.problems), 'problem')}" if self.runs.problems else ""
        return f"{versions} and {runs} deleted, {size(self.freed_bytes)} freed{problems}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "versions": list(self.versions.removed),
            "runs": [each.run.folder for each in self.runs.removed],
            "freed_bytes": self.freed_bytes,
            "problems": list(self.runs.problems),
        }


def policy_of(keep: KeepConfig, name: str) -> PrunePolicy:
    """Return which runs of that name `retrain.keep` keeps."""
    return PrunePolicy(keep=keep.runs, failed_keep=keep.failed_runs, name=name)


def clean_up(registry: ModelRegistry, model: str, keep: KeepConfig, runs_dir: str, name: str) -> CleanUpReport:
    """Delete the versions of a model, and the runs of a name, that `keep` does not keep.

    Runs that other models use stay. A run that cannot be deleted is one of the problems of the report.

    Raises StoreError, RegistryDamaged or UsageError if registry or runs cannot be read or written.
    """
    versions = prune_versions(registry, model, keep.versions)
    runs = prune(open_runs_dir(runs_dir), policy_of(keep, name), protected_runs(registry))
    return CleanUpReport(versions, runs)
