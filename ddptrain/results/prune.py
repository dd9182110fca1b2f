"""Deletes the runs that a policy does not keep, in a folder or in an object store.

A kill at any moment leaves no partial run. In a folder, the run directory is renamed to `.pruned-RUN-TOKEN`, which all
readers ignore, before its files are deleted. In a store, a mark is written and run.json is deleted before the other
files. The next prune finds the rest and continues.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddptrain import file_ops
from ddptrain.config.wording import counted, describe_value
from ddptrain.errors import RunLocked, RunNotFound, UsageError, one_line
from ddptrain.log import Log
from ddptrain.results import ownership
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.layout import MANIFEST, PRUNED, files_below, valid_run_id
from ddptrain.results.lookup import RunView, find_checkpoint, load_run, parse_time
from ddptrain.results.remote.lease import LOCK, StoreLock
from ddptrain.results.remote.runs import RunsDir, StoreRuns
from ddptrain.results.run_record import RecordError, RunRecord, RunStatus
from ddptrain.results.run_store import LocalRuns
from ddptrain.results.secure_files import is_own_folder
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import StoreError, StoreUnreachable, Transient

MARK = ".pruned.json"  # in a run of a store whose deletion has begun
_RECORD = "run.json"
_DELETERS = 16
_log = Log(__name__)
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
        return run.status
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
            "removed": [_as_dict(decision) for decision in self.removed],
            "kept": [_as_dict(decision) for decision in self.kept],
            "finished": [{"folder": name, "size_bytes": size} for name, size in self.finished_bytes.items()],
            "problems": list(self.problems),
        }


def prune(
    runs: RunsDir, policy: PrunePolicy, protected: Mapping[str, str] | None = None, *, dry_run: bool = False
) -> PruneReport:
    """Delete the runs that the policy does not keep, and finish interrupted deletions.

    protected: run id -> why the run stays, as "champion of petnames"; see retrain/clean_up.py.

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

    Raises RunLocked if it is running; UsageError, ResultsError, StoreError.
    """
    if view.problem:
        raise UsageError(f"run {view.run_id} cannot be deleted: {view.problem}")
    if view.is_running:
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
    return max(0.0, time.time() - (ended.timestamp() if ended else ownership.changed_at(view.layout)))


def _as_dict(decision: Decision) -> dict[str, Any]:
    return {**dataclasses.asdict(decision.run), "reason": decision.reason}


def _facts(view: RunView, age_s: float, size_bytes: int, *, has_checkpoint: bool, foreign: str = "") -> RunFacts:
    return RunFacts(
        view.layout.root.name,
        view.run_id,
        view.record.name,
        view.status,
        age_s,
        size_bytes,
        has_checkpoint,
        foreign,
        view.problem,
    )


# --- Runs in a folder of this machine ---


class FolderRemoval:
    """The runs of a folder of this machine, for `prune`."""

    def __init__(self, runs: LocalRuns) -> None:
        self._folder = runs.folder

    def facts(self, view: RunView, age_s: float) -> RunFacts:
        """Return the facts by which the policy decides about a run; `age_s`: seconds since its end."""
        folder = view.layout.root
        foreign = "a symbolic link" if folder.is_symlink() else "" if is_own_folder(folder) else "of another user"
        try:
            find_checkpoint(view.layout)
            has_checkpoint = True
        except (RunNotFound, OSError):
            has_checkpoint = False
        return _facts(view, age_s, folder_bytes(folder), has_checkpoint=has_checkpoint, foreign=foreign)

    def remove(self, chosen: RunView) -> None:
        """Delete a run directory.

        chosen: the run as it was when the decision was made.

        Raises RunLocked; ResultsError: either nothing is deleted, or the rest is in a folder that readers ignore.
        """
        folder = chosen.layout.root
        aside = folder.with_name(f"{PRUNED}{folder.name[:100]}-{secrets.token_hex(4)}")
        try:
            descriptor = ownership.take(chosen.layout.lock_file)  # so that no driver can resume it
        except ResultsError:
            if not folder.is_dir():  # another prune was faster
                raise RunLocked(f"run {folder.name} was deleted already") from None
            raise
        try:
            now = load_run(folder, is_ours=True)
            if (now.status, now.record.driver, now.problem) != (chosen.status, chosen.record.driver, ""):
                raise RunLocked(f"run {chosen.run_id} has changed since it was chosen: it is {now.shown_status}")
            with results_errors(folder, "move"):
                file_ops.publish(folder, aside)
            _log.info("run moved aside", run=folder.name, folder=aside)
            _delete(aside)
        finally:
            os.close(descriptor)

    def leftovers(self) -> list[tuple[str, int]]:
        """Return the folders, with their sizes in bytes, of runs whose deletion was interrupted."""
        folders = [path for path in file_ops.entries(self._folder) if path.name.startswith(PRUNED)]
        return [(each.name, folder_bytes(each)) for each in sorted(folders) if _is_ours(each)]

    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises ResultsError."""
        _delete(self._folder / name)


def _delete(folder: Path) -> None:
    with results_errors(folder, "delete"):
        while folder.exists():
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:  # another prune deletes it at the same time
                continue


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and is_own_folder(folder)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder in bytes."""
    return sum(size for _, size in files_below(folder))


# --- Runs in an object store ---


class StoredRemoval:
    """The runs of an object store, for `prune`; their files are listed once, at the start. Raises StoreError."""

    def __init__(self, runs: StoreRuns) -> None:
        self._runs = runs
        self._files: dict[str, dict[str, int]] = {}  # run -> path in the run -> size in bytes
        for path, file in runs.store.files().items():
            run, _, inside = path.partition("/")
            if inside and valid_run_id(run):
                self._files.setdefault(run, {})[inside] = file.size_bytes

    def facts(self, view: RunView, age_s: float) -> RunFacts:
        """Return the facts by which the policy decides about a run; `age_s`: seconds since its end."""
        folder = view.layout.root.name
        files = self._files.get(folder, {})
        manifests = [path for path in files if path.startswith("checkpoints/") and path.endswith(f"/{MANIFEST}")]
        return _facts(view, age_s, sum(files.values()), has_checkpoint=bool(manifests))

    def remove(self, chosen: RunView) -> None:
        """Delete a run, and its working folder on this machine.

        chosen: the run as it was when the decision was made. Raises RunLocked, StoreError.
        """
        name = chosen.layout.root.name
        with _lease(self._runs.store.below(name)) as run:
            _refuse_if_stored_changed(run, chosen)
            run.write(MARK, (json.dumps({"since": time.time()}) + "\n").encode())
            run.remove(_RECORD)
            _log.info("run.json deleted", run=name, store=run.url)
            _remove_files(run, run.files())
            shutil.rmtree(self._runs.work / name, ignore_errors=True)  # left by a driver that was killed

    def leftovers(self) -> list[tuple[str, int]]:
        """Return the runs whose deletion was interrupted, each with the size of what remains in bytes."""
        interrupted = (run for run, files in self._files.items() if MARK in files and _RECORD not in files)
        return [(run, sum(self._files[run].values())) for run in sorted(interrupted)]

    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises RunLocked, StoreError."""
        with _lease(self._runs.store.below(name)) as run:
            files = run.files()
            if MARK in files and _RECORD not in files:
                _remove_files(run, files)


@contextmanager
def _lease(run: RemoteFolder) -> Iterator[RemoteFolder]:
    """Hold the lease of a run; yield its folder. If no other file is left at the end, delete the lock file."""
    lock = StoreLock(run)
    lock.take()
    is_gone = False
    try:
        lock.keep()  # if the lease is lost, `guard` raises at the next change
        yield replace(run, guard=lock.assure)
        is_gone = set(run.files()) <= {LOCK}
    finally:
        lock.release(forget=is_gone)


def _refuse_if_stored_changed(run: RemoteFolder, chosen: RunView) -> None:
    """Raise RunLocked if a driver has resumed the run since it was chosen."""
    data = run.read(_RECORD)
    try:
        now = RunRecord.from_json(data) if data is not None else None
    except RecordError:
        now = None
    if now is None or now.driver != chosen.record.driver:
        raise RunLocked(f"run {chosen.run_id} has changed since it was chosen")


def _remove_files(run: RemoteFolder, paths: Collection[str]) -> None:
    """Delete the files in parallel, then the mark; the lock file stays. Raises StoreError."""
    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="ddptrain-prune") as pool:
        list(pool.map(run.remove, [path for path in paths if path not in (MARK, LOCK)]))
    run.remove(MARK)
