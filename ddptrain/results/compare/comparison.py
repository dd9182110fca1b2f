"""Compares runs: what differs, the last and best value of each metric, and their curves."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.results.compare.alignment import Alignment, aligned, best_alignment
from ddptrain.results.compare.differences import Differences, find_differences
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import AllSeries, read_series
from ddptrain.results.select.fields import best_value
from ddptrain.results.show.curves import Curve, Panel, Plot
from ddptrain.tracking.metric_goals import goal_of

_MOST_PANELS = 6  # if no metric is a loss
Values = tuple[float | None, ...]  # one for each run


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """The values of a metric in each run; `goal` is "min", "max", or "" if it is not known, and then best is empty."""

    name: str
    goal: str
    last: Values
    best: Values

    @property
    def winner(self) -> int | None:
        """The index of the run with the best value; None if fewer than two runs have a value, or on a tie."""
        values = [value for value in self.best if value is not None]
        if len(values) < 2:
            return None
        top = min(values) if self.goal == "min" else max(values)
        return self.best.index(top) if values.count(top) == 1 else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs, the first of which is the base of differences; `plot` has a panel for each metric, a curve for each run."""

    views: tuple[RunView, ...]
    differences: Mapping[str, Differences]
    metrics: tuple[MetricComparison, ...]
    plot: Plot

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for --json."""
        return {
            "runs": [view.as_dict() for view in self.views],
            "differences": self.differences,
            "metrics": [
                {
                    "name": metric.name,
                    "goal": metric.goal or None,
                    "last": metric.last,
                    "last_difference": changes(metric.last),
                    "best": metric.best,
                    "best_difference": changes(metric.best),
                    "winner": None if metric.winner is None else self.views[metric.winner].run_id,
                }
                for metric in self.metrics
            ],
            "x": self.plot.x_name,
            "series": [
                {"name": panel.quantity, "run": curve.name.partition(" ")[2], "x": curve.main[0], "y": curve.main[1]}
                for panel in self.plot.panels
                for curve in panel.curves
            ],
        }


def changes(values: Values) -> Values:
    """Return the difference of each value to the first value; None where one of the two is missing."""
    first = values[0] if values else None
    return tuple(None if value is None or first is None else value - first for value in values)


def compare_runs(
    views: Sequence[RunView], alignment: Alignment | None = None, metrics: Sequence[str] = ()
) -> Comparison:
    """Compare runs. `metrics` names the metrics to draw; by default the losses, or else the first six metrics.

    Raises UsageError for one run, an unknown metric, or a run without values for the alignment; ResultsError.
    """
    if len({view.layout.where for view in views}) < 2:
        raise UsageError(f"give at least two different runs to compare, not only {views[0].run_id}")
    series = [read_series(view.layout.metrics_jsonl, view.record.attempts) for view in views]
    compared = [_metric(name, views, series) for name in _names(views, series)]
    return Comparison(tuple(views), find_differences(views), tuple(compared), _plot(views, series, alignment, metrics))


def labels(views: Sequence[RunView]) -> list[str]:
    """Return a short label for each run: A, B, ... Z, AA, AB, ..."""
    lengths = itertools.count(1)
    every = (letters for length in lengths for letters in itertools.product(string.ascii_uppercase, repeat=length))
    return ["".join(letters) for letters in itertools.islice(every, len(views))]


def _names(views: Sequence[RunView], series: Sequence[AllSeries]) -> list[str]:
    logged = {name for run_series in series for name, _ in run_series}
    best = {view.record.best.metric for view in views if view.record.best is not None}
    return sorted(logged.union(best, *(view.record.last_metrics for view in views)))


def _metric(name: str, views: Sequence[RunView], series: Sequence[AllSeries]) -> MetricComparison:
    modes = [view.record.best.mode for view in views if view.record.best and view.record.best.metric == name]
    goal = goal_of(name, name if modes else "", modes[0] if modes else "min")
    last = tuple(view.record.numbers.get(name) for view in views)
    best = (
        tuple(best_value(view, name, run_series, goal) for view, run_series in zip(views, series, strict=True))
        if goal
        else ()
    )
    return MetricComparison(name, goal, last, best or (None,) * len(views))


def _plot(
    views: Sequence[RunView], series: Sequence[AllSeries], alignment: Alignment | None, wanted: Sequence[str]
) -> Plot:
    known = sorted({name for run_series in series for name, _ in run_series})
    for name in wanted:
        if name not in known:
            raise UsageError(f'none of the runs has logged "{shorten(name)}"; {did_you_mean(name, known)}')
    losses = [name for name in known if "loss" in name.rpartition("/")[2]]
    names = list(dict.fromkeys(wanted)) or losses or known[:_MOST_PANELS]
    chosen = alignment or best_alignment(series, names)
    panels = []
    for name in names:
        curves = []
        for label, view, run_series in zip(labels(views), views, series, strict=True):
            if (points := aligned(view, run_series, name, chosen)) is not None:
                curves.append(Curve(f"{label} {view.run_id}", {0: points}, points))
        panels.append(Panel(name, tuple(curves)))
    return Plot(f"{len(views)} runs", f"by {chosen}", chosen.x_name, tuple(panels))
