"""What a page consists of: runs and a sweep, with the data of its script."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ddptrain import __version__
from ddptrain.config.wording import counted, shorten
from ddptrain.errors import UsageError
from ddptrain.reports.html.render import render_page
from ddptrain.reports.html.run_card import MOST_RUNS, RunCard, read_card
from ddptrain.reports.html.sweep import SweepTable
from ddptrain.results.layout import valid_run_id
from ddptrain.results.lookup import RunView
from ddptrain.results.remote.runs import open_runs_dir, split_run
from ddptrain.results.run_store import NeededFiles
from ddptrain.results.sweep_record import FoundSweep, find_sweep

_MOST_COLUMNS = 6  # of settings, and of metrics, in the table of runs
_ID_CHARACTERS = 120
_MOST_IN_CONTENTS = 10
_MOST_DETAILED = 20  # runs with logs, configuration, images and tables
_RUNS_OF_SWEEP = 50  # the best ones


@dataclass(frozen=True, slots=True)
class Page:
    """The page. differing: settings whose values are not the same in all runs. shared_metrics: those of most runs."""

    title: str
    subtitle: str
    cards: Sequence[RunCard]
    sweep: SweepTable | None
    differing: Sequence[str]
    shared_metrics: Sequence[str]
    version: str = __version__
    written_at: str = ""

    @property
    def has_curves(self) -> bool:
        """Whether a run has logged numbers."""
        return any(card.curves for card in self.cards)

    @property
    def contents(self) -> list[tuple[str, str]]:
        """The entries of the table of contents: anchors and labels."""
        found = [("sweep", "Sweep")] if self.sweep else []
        found += [("runs", "Runs")] if len(self.cards) > 1 else []
        if len(self.cards) == 1:
            found += self.cards[0].sections
        else:
            found += [("curves", "Curves")] if self.has_curves else []
            several = self.cards if len(self.cards) <= _MOST_IN_CONTENTS else ()  # the table of runs has links, too
            found += [(f"run-{at}", shorten(card.view.run_id, _ID_CHARACTERS)) for at, card in enumerate(several)]
        return found

    def setting_values(self, card: RunCard) -> list[str]:
        """Return the values of `differing`."""
        values = {setting.key: setting.value for setting in card.settings}
        return [values.get(key, "") for key in self.differing]

    def metric_values(self, card: RunCard) -> list[float | None]:
        """Return the last values of `shared_metrics`."""
        values = {metric.name: metric.last for metric in card.metrics}
        return [values.get(name) for name in self.shared_metrics]


def html_page(subjects: Subjects) -> bytes:
    """Return the page of the subjects as UTF-8."""
    count = len(subjects.views)
    cards = [read_card(view, of=count, is_detailed=at < _MOST_DETAILED) for at, view in enumerate(subjects.views)]
    page = Page(
        title=_title(subjects),
        subtitle=_subtitle(subjects),
        cards=cards,
        sweep=subjects.sweep,
        differing=_differing(cards),
        shared_metrics=_shared_metrics(cards),
        written_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
    )
    data = {
        "runs": [{"id": label} for label in _labels(cards)],
        "curves": [{"run": at, **curve} for at, card in enumerate(cards) for curve in card.curves],
        "sweep": subjects.sweep.for_script() if subjects.sweep else None,
    }
    return render_page(page, data)


def _title(subjects: Subjects) -> str:
    if subjects.sweep is not None:
        return f"Sweep {shorten(subjects.sweep.record.sweep_id, _ID_CHARACTERS)}"
    if len(subjects.views) == 1:
        return f"Run {shorten(subjects.views[0].run_id, _ID_CHARACTERS)}"
    return counted(len(subjects.views), "run")


def _subtitle(subjects: Subjects) -> str:
    states = Counter(view.shown_status for view in subjects.views)
    by_state = ", ".join(f"{count} {shorten(state, 40)}" for state, count in states.most_common(8))
    return f"{counted(len(subjects.views), 'run')}: {by_state}." if len(subjects.views) > 1 else ""


def _labels(cards: Sequence[RunCard]) -> list[str]:
    """Return the ids of the runs; a second run of the same id, from another folder, gets a number."""
    seen: Counter[str] = Counter()
    labels = []
    for card in cards:
        label = shorten(card.view.run_id, _ID_CHARACTERS)
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return labels


def _differing(cards: Sequence[RunCard]) -> list[str]:
    found = [{setting.key: setting.value for setting in card.settings} for card in cards if card.settings]
    names = dict.fromkeys(key for settings in found for key in settings)
    keys = [key for key in names if len({settings.get(key) for settings in found}) > 1]
    return sorted(keys, key=lambda key: not key.startswith("params."))[:_MOST_COLUMNS]


def _shared_metrics(cards: Sequence[RunCard]) -> list[str]:
    counts = Counter(metric.name for card in cards for metric in card.metrics)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], not item[0].startswith("val"), "loss" not in item[0]))
    return [name for name, _ in ordered[:_MOST_COLUMNS]]


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
