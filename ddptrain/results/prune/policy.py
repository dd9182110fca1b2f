"""Decides which runs `results prune` deletes. The functions read no files and no clock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddptrain.config.wording import counted, describe_value
from ddptrain.results.run_record import RunStatus

_RESUMABLE = frozenset((RunStatus.FAILED, RunStatus.PREEMPTED, RunStatus.CANCELLED))
_ENDED = _RESUMABLE | {RunStatus.SUCCEEDED}
_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)}}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGTP]?I?)B?", re.IGNORECASE | re.ASCII)


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
    for run in runs:
        if not run.foreign and not run.problem:
            newest.setdefault(run.name, run.folder)
    return [_protection(run, protected, is_newest=newest.get(run.name) == run.folder) for run in runs]


def _protection(run: RunFacts, protected: Mapping[str, str], *, is_newest: bool) -> str:
    if run.foreign:
        return run.foreign
    if run.problem:
        return "run.json cannot be read"
    if run.status not in _ENDED:
        return "may be running" if run.status == RunStatus.UNKNOWN else run.status
    if reason := protected.get(run.run_id) or protected.get(run.folder):
        return reason
    if is_newest and run.status in _RESUMABLE and run.has_checkpoint:
        return "can be resumed"
    return ""


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
