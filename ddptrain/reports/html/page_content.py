"""What a page consists of: runs, a sweep and models, with the data of its script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddptrain import __version__
from ddptrain.config.wording import counted, shorten
from ddptrain.reports.html.render import render_page
from ddptrain.reports.html.run_card import Limits, RunCard, read_card
from ddptrain.reports.html.subjects import ModelCard, Subjects
from ddptrain.reports.html.sweep import Sweep

_MOST_COLUMNS = 6  # of settings, and of metrics, in the table of runs
_ID_CHARACTERS = 120
_MOST_IN_CONTENTS = 10
_LEAST_VERSIONS = 2  # of a chart


@dataclass(frozen=True, slots=True)
class ModelChart:
    """A metric of a model by version; `index` is its place in the data of the script."""

    model: str
    name: str
    index: int
    x: Sequence[int]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Page:
    """The page. differing: settings whose values are not the same in all runs. shared_metrics: those of most runs.

    reload_s: seconds until a page that is written again reloads itself; None: it does not.
    """

    title: str
    subtitle: str
    cards: Sequence[RunCard]
    models: Sequence[ModelCard]
    sweep: Sweep | None
    differing: Sequence[str]
    shared_metrics: Sequence[str]
    model_charts: Sequence[ModelChart]
    reload_s: int | None = None
    version: str = __version__
    written_at: str = ""

    @property
    def has_curves(self) -> bool:
        """Whether a run has logged numbers."""
        return any(card.curves for card in self.cards)

    @property
    def contents(self) -> list[tuple[str, str]]:
        """The entries of the table of contents: anchors and labels."""
        found = [(f"model-{at}", f"Model {model.name}") for at, model in enumerate(self.models)]
        found += [("sweep", "Sweep")] if self.sweep else []
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


def html_page(subjects: Subjects, *, reload_s: int | None = None, was_watched: bool = False) -> bytes:
    """Return the page of the subjects as UTF-8, less than about 20 MB.

    reload_s: seconds until the page reloads itself. was_watched: it may be a page that has reloaded itself.
    """
    limits = Limits.for_runs(len(subjects.views))
    cards = [read_card(view, limits) for view in subjects.views]
    charts = _model_charts(subjects.models)
    page = Page(
        title=_title(subjects),
        subtitle=_subtitle(subjects),
        cards=cards,
        models=subjects.models,
        sweep=subjects.sweep,
        differing=_differing(cards),
        shared_metrics=_shared_metrics(cards),
        model_charts=charts,
        reload_s=reload_s,
        written_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
    )
    data = {
        "runs": [{"id": label} for label in _labels(cards)],
        "curves": [{"run": at, **curve} for at, card in enumerate(cards) for curve in card.curves],
        "sweep": _sweep_data(subjects.sweep),
        "model": [{"name": chart.name, "x": chart.x, "y": chart.y} for chart in charts],
        "reload_s": reload_s,
        "watched": was_watched,
    }
    return render_page(page, data)


def _title(subjects: Subjects) -> str:
    if subjects.sweep is not None:
        return f"Sweep {subjects.sweep.name}"
    if len(subjects.models) == 1:
        return f"Model {subjects.models[0].name}"
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


def _model_charts(models: Sequence[ModelCard]) -> list[ModelChart]:
    charts: list[ModelChart] = []
    for model in models:
        for name in model.metrics:
            found = [(version.version, model.values(version)) for version in reversed(model.versions)]
            points = [(number, values[name]) for number, values in found if name in values]
            if len(points) >= _LEAST_VERSIONS:
                x, y = zip(*points, strict=True)
                charts.append(ModelChart(model.name, name, len(charts), x, y))
    return charts


def _sweep_data(sweep: Sweep | None) -> dict[str, Any] | None:
    if sweep is None:
        return None
    return {
        "metric": sweep.metric or "value",
        "best": sweep.best,
        "ranked": [trial.number for trial in sweep.ranked()],
        "axes": [
            {"name": axis.name, "scale": axis.scale, "values": list(axis.values), "importance": axis.importance}
            for axis in sweep.axes
        ],
        "trials": [
            {
                "number": trial.number,
                "state": trial.state,
                "params": [axis.place(value) for axis, value in zip(sweep.axes, trial.params, strict=True)],
                "value": trial.value,
            }
            for trial in sweep.trials
        ],
    }
