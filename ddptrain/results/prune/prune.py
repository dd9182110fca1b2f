"""Deletes the runs that a policy does not keep, in a folder or in an object store."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddptrain.config.wording import counted
from ddptrain.errors import RunLocked, UsageError, one_line
from ddptrain.results.errors import ResultsError
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.ownership import liveness
from ddptrain.results.prune.folder_removal import FolderRemoval
from ddptrain.results.prune.policy import Decision, PrunePolicy, decide
from ddptrain.results.prune.stored_removal import StoredRemoval
from ddptrain.results.remote.runs import RunsDir, StoreRuns
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_store import LocalRuns
from ddptrain.storage.store import StoreError, StoreUnreachable, Transient


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was deleted, or would be deleted if `dry_run`.

    decisions: one for each run, newest first; a run that could not be deleted stays, with the reason.
    finished_bytes: folder name -> size of each run whose deletion an earlier prune had not finished.
    problems: why something could not be deleted, one line each.
    """

    decisions: tuple[Decision, ...]
    finished_bytes: Mapping[str, int]
    problems: tuple[str, ...]
    dry_run: bool

    @property
    def removed(self) -> list[Decision]:
        """The runs that are deleted, newest first."""
        return [decision for decision in self.decisions if decision.goes]

    @property
    def kept(self) -> list[Decision]:
        """The runs that stay, newest first."""
        return [decision for decision in self.decisions if not decision.goes]

    @property
    def freed_bytes(self) -> int:
        """Bytes that are freed, including interrupted deletions that are now finished."""
        return sum(decision.run.size_bytes for decision in self.removed) + sum(self.finished_bytes.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the runs that stay."""
        return sum(decision.run.size_bytes for decision in self.kept)

    @property
    def summary(self) -> str:
        """One line, as "3 runs deleted, 41.2 MiB freed"."""
        from ddptrain.results.show.render import size

        verbs = ("would be deleted", "would be freed") if self.dry_run else ("deleted", "freed")
        results = f"{counted(len(self.removed), 'run')} {verbs[0]}, {size(self.freed_bytes)} {verbs[1]}"
        return f"{results}; {counted(len(self.problems), 'problem')}" if self.problems else results

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "dry_run": self.dry_run,
            "freed_bytes": self.freed_bytes,
            "kept_bytes": self.kept_bytes,
            "removed": [_as_dict(decision) for decision in self.removed],
            "kept": [_as_dict(decision) for decision in self.kept],
            "finished": [{"folder": name, "size_bytes": size} for name, size in self.finished_bytes.items()],
            "problems": list(self.problems),
        }


def prune(
    runs: RunsDir, policy: PrunePolicy, protected: Mapping[str, str] | None = None, *, dry_run: bool = False
) -> PruneReport:
    """Delete the runs that the policy does not keep, and finish interrupted deletions.

    protected: run id -> why the run stays, as "champion of petnames"; see retrain/cleanup/clean_up.py.

    A run that a driver resumes meanwhile stays. The report lists what could not be deleted.
    Raises UsageError if the folder cannot be listed; StoreError if the store does not answer.
    """
    removal = _removal(runs)
    views = [view for view in runs.list() if policy.name in (None, view.record.name)]
    decisions = decide([removal.facts(view, _age_s(view)) for view in views], policy, protected or {})
    leftovers = dict(removal.leftovers())
    if dry_run:
        return PruneReport(tuple(decisions), leftovers, (), dry_run)
    deletions = _Deletions()
    finished = {
        name: size for name, size in leftovers.items() if not deletions.try_delete(partial(removal.finish, name))
    }
    results = []
    for view, decision in zip(views, decisions, strict=True):
        reason = deletions.try_delete(partial(removal.remove, view)) if decision.goes else ""
        results.append(dataclasses.replace(decision, goes=False, reason=reason) if reason else decision)
    return PruneReport(tuple(results), finished, tuple(deletions.problems), dry_run)


def remove_run(runs: RunsDir, view: RunView) -> int:
    """Delete one run; return its size in bytes.

    Raises RunLocked if it is running or may be; UsageError, ResultsError, StoreError.
    """
    if view.problem:
        raise UsageError(f"run {view.run_id} cannot be deleted: {view.problem}")
    if view.status in (RunStatus.RUNNING, RunStatus.UNKNOWN):
        raise RunLocked(
            f"run {view.run_id} is {view.shown_status}, and is not deleted; ddptrain stop {view.run_id} ends it"
        )
    if isinstance(runs, StoreRuns) and view.layout.root.parent != runs.copies:
        raise UsageError(f"{view.run_id} is a trial of a sweep in a store: only whole runs can be deleted there")
    removal = _removal(runs)
    size_bytes = removal.facts(view, 0.0).size_bytes
    removal.remove(view)
    return size_bytes


def _removal(runs: RunsDir) -> FolderRemoval | StoredRemoval:
    return FolderRemoval(runs) if isinstance(runs, LocalRuns) else StoredRemoval(runs)


class _Deletions:
    """Executes deletions and collects the problems. If a store does not answer, no further deletion is tried."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._is_unreachable = False

    def try_delete(self, delete: Callable[[], None]) -> str:
        """Call `delete`; return why it failed, or ""."""
        if self._is_unreachable:
            return "the store does not answer"
        try:
            delete()
        except RunLocked:
            return "in use"
        except (ResultsError, StoreError) as error:
            self.problems.append(one_line(error))
            self._is_unreachable = isinstance(error, StoreUnreachable | Transient)
            return "cannot be deleted"
        return ""


def _age_s(view: RunView) -> float:
    """Return the seconds since the end of a run, or else since its start, or else since its files changed."""
    ended = parse_time(view.record.ended_at) or parse_time(view.record.started_at)
    return max(0.0, time.time() - (ended.timestamp() if ended else liveness.changed_at(view.layout)))


def _as_dict(decision: Decision) -> dict[str, Any]:
    return {**dataclasses.asdict(decision.run), "reason": decision.reason}
