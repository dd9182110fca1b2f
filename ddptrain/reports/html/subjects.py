"""Finds what a report is about: runs, or a sweep with its best runs, by their names on the command line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ddptrain.errors import UsageError
from ddptrain.reports.html.run_card import MOST_RUNS
from ddptrain.reports.html.sweep import SweepTable
from ddptrain.results.layout import valid_run_id
from ddptrain.results.lookup import RunView
from ddptrain.results.remote.runs import open_runs_dir, split_run
from ddptrain.results.run_store import NeededFiles
from ddptrain.results.sweep_record import FoundSweep, find_sweep

_RUNS_OF_SWEEP = 50  # the best ones


@dataclass(frozen=True, slots=True)
class Subjects:
    """The runs, and the sweep if there is one (its best runs are among the runs)."""

    views: Sequence[RunView]
    sweep: SweepTable | None = None


def find_subjects(names: Sequence[str], runs_dir: str) -> Subjects:
    """Return what the names stand for: sweeps or runs. Raises UsageError, RunNotFound, StoreError."""
    views: list[RunView] = []
    sweeps: list[FoundSweep] = []
    for name in dict.fromkeys(names):
        if (found := find_sweep(runs_dir, name)) is not None:
            sweeps.append(found)
        else:
            place, run = split_run(name, runs_dir)
            views.append(open_runs_dir(place).find(run, NeededFiles.REPORT))
    if len(sweeps) > 1:
        raise UsageError(f"a report has at most one sweep, got {len(sweeps)}; write one report for each")
    sweep = SweepTable.of(sweeps[0].record) if sweeps else None
    if sweep is not None:
        views += _runs_of(sweep, sweeps[0])
    views = list({view.layout.root: view for view in views}.values())
    if len(views) > MOST_RUNS:
        raise UsageError(f"a report has at most {MOST_RUNS} runs, got {len(views)}; name fewer")
    return Subjects(views, sweep)


def _runs_of(sweep: SweepTable, found: FoundSweep) -> list[RunView]:
    """Return the runs of the trials that are running, and of the best ones; then of those that failed."""
    running = [trial for trial in sweep.trials if trial.state == "running"]
    failed = [trial for trial in sweep.trials if trial.state == "failed"]
    names = dict.fromkeys(name for trial in (*running, *sweep.ranked(), *failed) for name in trial.run_ids)
    runs = (found.trials.find_exact(name, NeededFiles.REPORT) for name in names if valid_run_id(name))
    return list(itertools.islice((view for view in runs if view is not None), _RUNS_OF_SWEEP))
