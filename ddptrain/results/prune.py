"""Deletes the runs that a policy does not keep, in a folder or in an object store.

A kill at any moment leaves no partial run (see results/runs.py). The next prune finds the rest and continues.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ddptrain.config.wording import counted, describe_value
from ddptrain.errors import RunLocked, UsageError, one_line
from ddptrain.results.errors import ResultsError
from ddptrain.results.run import Run, parse_time
from ddptrain.results.run_record import RunStatus
from ddptrain.results.runs import Runs
from ddptrain.storage.store import StoreError, StoreUnreachable, Transient

_RESUMABLE = frozenset((RunStatus.FAILED, RunStatus.PREEMPTED, RunStatus.CANCELLED))
_ENDED = _RESUMABLE | {RunStatus.SUCCEEDED}
_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)}}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGTP]?I?)B?", re.IGNORECASE | re.ASCII)


# --- Policy: no files are read, and no clock ---


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts by which a policy decides about a run.

    folder: the name of its folder, which identifies the run. age_s: seconds since its end, or since its files changed.
    foreign: why this user must not delete its folder, or "". problem: why run.json cannot be read, or "".
    """

    folder: str
    run_id: str
    name: str
    status: str
    age_s: float
    size_bytes: int
    has_checkpoint: bool = False
    foreign: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """Which runs stay.

    keep: how many successful runs of each name stay, the newest ones. failed_keep: how many other runs.
    older_than_s: runs that ended less than so many seconds ago stay as well; None: age does not matter.
    max_size_bytes: if the runs that stay are larger, the oldest are deleted too; None: no limit.
    name: only runs of this name are counted and deleted; None: all.
    """

    keep: int = 20
    failed_keep: int = 5
    older_than_s: float | None = None
    max_size_bytes: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A run, whether it is deleted (`goes`), and why it is deleted or stays."""

    run: RunFacts
    goes: bool
    reason: str


def decide(runs: Sequence[RunFacts], policy: PrunePolicy, protected: Mapping[str, str]) -> list[Decision]:
    """Return a decision about each run of `policy.name`, in the same order.

    runs: newest first, as `results list` shows them. protected: run id -> why it stays, as "champion of petnames".
    """
    chosen = [run for run in runs if policy.name in (None, run.name)]
    reasons = _reasons_to_stay(chosen, protected)
    decisions = _by_count(chosen, policy, reasons)
    if policy.max_size_bytes is None:
        return decisions
    left_bytes = sum(decision.run.size_bytes for decision in decisions if not decision.goes)
    for index in reversed(range(len(decisions))):  # the oldest first
        run, is_free = chosen[index], not decisions[index].goes and not reasons[index]
        if is_free and run.size_bytes and left_bytes > policy.max_size_bytes:
            decisions[index] = Decision(run, True, "above --max-size")
            left_bytes -= run.size_bytes
    return decisions


def _reasons_to_stay(runs: Sequence[RunFacts], protected: Mapping[str, str]) -> list[str]:
    """Return for each run why it stays independently of the policy, or ""."""
    newest: dict[str, str] = {}  # name -> folder of the run that `--resume auto` would resume
    reasons = []
    for run in runs:
        if not run.foreign and not run.problem:
            newest.setdefault(run.name, run.folder)
        reason = run.foreign or (run.problem and "run.json cannot be read")
        reason = reason or ("" if run.status in _ENDED else run.status)
        reason = reason or protected.get(run.run_id) or protected.get(run.folder, "")
        is_resumable = run.status in _RESUMABLE and run.has_checkpoint and newest.get(run.name) == run.folder
        reasons.append(reason or ("can be resumed" if is_resumable else ""))
    return reasons


def _by_count(runs: Sequence[RunFacts], policy: PrunePolicy, reasons: Sequence[str]) -> list[Decision]:
    counts: Counter[tuple[str, bool]] = Counter()
    decisions = []
    for run, reason in zip(runs, reasons, strict=True):
        succeeded = run.status == RunStatus.SUCCEEDED
        limit, what = (policy.keep, "successful") if succeeded else (policy.failed_keep, "failed")
        if run.status in _ENDED and not run.foreign and not run.problem:
            counts[run.name, succeeded] += 1
        if reason:
            decisions.append(Decision(run, False, reason))
        elif counts[run.name, succeeded] <= limit:
            decisions.append(Decision(run, False, f"among the newest {limit} {what}"))
        elif policy.older_than_s is not None and run.age_s <= policy.older_than_s:
            decisions.append(Decision(run, False, "not old enough"))
        else:
            decisions.append(Decision(run, True, counted(limit, f"newer {what} run") if limit else f"a {what} run"))
    return decisions


def size_bytes(text: str) -> int:
    """Convert a size such as "200GB", "500 MB", "1.5TiB" or "1000" (bytes) to bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].upper() if match else "?"
    if match is None or unit not in _UNITS:
        raise ValueError(f'{describe_value(text)} is not a size: write a number with KB, MB, GB or TB, as in "200GB"')
    return int(float(match[1]) * _UNITS[unit])


# --- Deleting ---


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
            "removed": [{**asdict(each.run), "reason": each.reason} for each in self.removed],
            "kept": [{**asdict(each.run), "reason": each.reason} for each in self.kept],
            "finished": [{"folder": name, "size_bytes": size} for name, size in self.finished_bytes.items()],
            "problems": list(self.problems),
        }


def prune(
    runs: Runs, policy: PrunePolicy, protected: Mapping[str, str] | None = None, *, dry_run: bool = False
) -> PruneReport:
    """Delete the runs that the policy does not keep, and finish interrupted deletions.

    protected: run id -> why the run stays, as "champion of petnames"; see retrain/clean_up.py.

    A run that a driver resumes meanwhile stays. The report lists what could not be deleted.
    Raises UsageError if the folder cannot be listed; StoreError if the store does not answer.
    """
    views = [view for view in runs.list(sizes=True) if policy.name in (None, view.record.name)]
    decisions = decide([_facts(view) for view in views], policy, protected or {})
    leftovers = runs.leftovers()
    if dry_run:
        return PruneReport(tuple(decisions), leftovers, (), dry_run)
    problems: list[str] = []
    is_unreachable = False  # then no further deletion is tried

    def why_not(delete: Callable[[], None]) -> str:
        """Call `delete`; return why it failed, or ""."""
        nonlocal is_unreachable
        if is_unreachable:
            return "the store does not answer"
        try:
            delete()
        except RunLocked:
            return "in use"
        except (ResultsError, StoreError) as error:
            problems.append(one_line(error))
            is_unreachable = isinstance(error, StoreUnreachable | Transient)
            return "cannot be deleted"
        return ""

    finished = {name: size for name, size in leftovers.items() if not why_not(partial(runs.finish, name))}
    results = []
    for view, decision in zip(views, decisions, strict=True):
        reason = why_not(partial(runs.delete, view)) if decision.goes else ""
        results.append(replace(decision, goes=False, reason=reason) if reason else decision)
    return PruneReport(tuple(results), finished, tuple(problems), dry_run)


def remove_run(runs: Runs, view: Run) -> int:
    """Delete one run; return its size in bytes.

    Raises RunLocked if it is running; UsageError, ResultsError, StoreError.
    """
    if view.problem:
        raise UsageError(f"run {view.run_id} cannot be deleted: {view.problem}")
    if view.goes_on:
        raise RunLocked(
            f"run {view.run_id} is {view.shown_status}, and is not deleted; ddptrain stop {view.run_id} ends it"
        )
    size_bytes = view.size_bytes
    runs.delete(view)
    return size_bytes


def _facts(view: Run) -> RunFacts:
    ended = parse_time(view.record.ended_at) or parse_time(view.record.started_at)
    return RunFacts(
        folder=view.root.name,
        run_id=view.run_id,
        name=view.record.name,
        status=view.status,
        age_s=max(0.0, time.time() - (ended.timestamp() if ended else view.changed_at)),
        size_bytes=view.size_bytes,
        has_checkpoint=view.has_checkpoint(),
        foreign=view.why_foreign(),
        problem=view.problem,
    )
