"""What a page consists of: runs and a sweep, with the data of its script."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddptrain.config.wording import counted, shorten
from ddptrain.errors import UsageError
from ddptrain.reports.html.render import render_page
from ddptrain.reports.html.run_card import MOST_RUNS, RunCard, read_card
from ddptrain.results.layout import valid_run_id
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import finite_number
from ddptrain.results.runs import NeededFiles, open_runs_dir, split_run
from ddptrain.results.sweep_record import FoundSweep, SweepRecord, TrialRecord, find_sweep
from ddptrain.version import __version__

_MOST_COLUMNS = 6  # of settings, and of metrics, in the table of runs
_ID_CHARACTERS = 120
_MOST_IN_CONTENTS = 10
_MOST_DETAILED = 20  # runs with logs, configuration, images and tables
_RUNS_OF_SWEEP = 50  # the best ones
_MOST_TRIALS = 2000
_MOST_PARAMS = 20
_CHARACTERS = 100


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


@dataclass(frozen=True, slots=True)
class Axis:
    """A parameter of the search space. scale: linear, log, or choice with `values` in their order."""

    name: str
    scale: str
    values: Sequence[str]
    importance: float | None

    def value(self, trial: TrialRecord) -> float | str | None:
        """Return the value of a trial: a number, a text, or None."""
        if self.name not in trial.params:
            return None
        value = trial.params[self.name]
        number = finite_number(value)
        return number if number is not None else _text(value)


@dataclass(frozen=True, slots=True)
class SweepTable:
    """What the page shows of a sweep. hidden: trials that are left out."""

    record: SweepRecord
    axes: Sequence[Axis]
    trials: Sequence[TrialRecord]
    hidden: int

    @classmethod
    def of(cls, record: SweepRecord) -> SweepTable:
        """Return the table of a sweep."""
        importance = record.importance or {}
        names = list(record.space)[:_MOST_PARAMS]
        axes = [_axis(name, record.space[name], finite_number(importance.get(name))) for name in names]
        return cls(record, axes, record.trials[:_MOST_TRIALS], max(0, len(record.trials) - _MOST_TRIALS))

    def ranked(self) -> list[TrialRecord]:
        """Return the trials with a value, the best first; complete ones come before the others."""
        sign = -1.0 if self.record.mode == "max" else 1.0
        known = [trial for trial in self.trials if finite_number(trial.value) is not None]
        return sorted(known, key=lambda trial: (trial.state != "complete", sign * (trial.value or 0.0)))

    def for_script(self) -> dict[str, Any]:
        """Return the data of the plot."""
        return {
            "metric": self.record.metric or "value",
            "best": self.record.best,
            "ranked": [trial.number for trial in self.ranked()],
            "axes": [
                {
                    "name": axis.name[:_CHARACTERS],
                    "scale": axis.scale,
                    "values": axis.values,
                    "importance": axis.importance,
                }
                for axis in self.axes
            ],
            "trials": [
                {
                    "number": trial.number,
                    "state": trial.state,
                    "params": [_place(axis, trial) for axis in self.axes],
                    "value": finite_number(trial.value),
                }
                for trial in self.trials
            ],
        }


def _axis(name: str, space: Mapping[str, Any], importance: float | None) -> Axis:
    kind, choices = space.get("kind"), space.get("values")
    if kind == "choice":
        values = [_text(value) for value in choices[:_MOST_TRIALS]] if isinstance(choices, list) else []
        return Axis(name, "choice", values, importance)
    return Axis(name, "log" if kind in ("log", "log_int") else "linear", (), importance)


def _place(axis: Axis, trial: TrialRecord) -> float | str | None:
    """Return a value for the plot: one of the axis' values, or a number."""
    value = axis.value(trial)
    return _text(value) if axis.scale == "choice" and value is not None else value


def _text(value: Any) -> str:
    number = finite_number(value)
    if number is not None:
        return f"{number:.12g}"
    return (value if isinstance(value, str) else json.dumps(value))[:_CHARACTERS]
