"""Turns the metrics of a run into curves: which to show, against what, one per rank and their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.results.metrics import AllSeries, Series, read_series
from ddptrain.results.run import Run
from ddptrain.results.system import PREFIX, read_system, system_series

Points = tuple[list[float], list[float]]
_MOST_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric: the points of each rank, and in `main` their mean if ranks differ, else the points of any rank."""

    name: str
    ranks: dict[int, Points]
    main: Points

    @property
    def is_mean(self) -> bool:
        """Whether ranks differ, so that `main` is a mean."""
        return len(self.ranks) > 1

    @property
    def label(self) -> str:
        """The metric's name, for a legend."""
        return f"{self.name}, mean of {len(self.ranks)} ranks" if self.is_mean else self.name


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that share an axis: one quantity of several data sets, such as train/loss and val/loss."""

    quantity: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """Everything to draw; `x_name` is step, epoch or time_s."""

    run_id: str
    status: str
    x_name: str
    panels: tuple[Panel, ...]


def plot_of(view: Run, metrics: Sequence[str] = ()) -> Plot:
    """Return the curves of these metrics; without `metrics` of all losses, or of everything logged if there is no loss.

    System metrics are called system/gpu_percent (of ranks) and system/host/cpu_percent (of hosts).

    Raises UsageError if the run has logged no such metric, or none at all.
    """
    series = read_series(view.metrics_jsonl)
    if any(name.startswith(PREFIX) for name in metrics):
        series |= system_series(read_system(view.system_jsonl))
    return _plot(view, series, _chosen_names(view, sorted({name for name, _ in series}), metrics))


def whole_plot(view: Run) -> Plot:
    """Return the curves of every metric of the run; none if it has logged nothing. Raises ResultsError."""
    series = read_series(view.metrics_jsonl)
    return _plot(view, series, sorted({name for name, _ in series}))


def _plot(view: Run, series: AllSeries, names: Sequence[str]) -> Plot:
    series = {key: rank_series for key, rank_series in series.items() if key[0] in names}
    x_name = _x_name(list(series.values()))
    panels: dict[str, list[Curve]] = {}
    for name in names:
        panels.setdefault(PurePosixPath(name).name, []).append(_curve(name, series, x_name))
    drawn = tuple(Panel(quantity, tuple(curves)) for quantity, curves in panels.items())
    return Plot(view.run_id, view.status, x_name, drawn)


def _chosen_names(view: Run, known: list[str], wanted: Sequence[str]) -> list[str]:
    if not known:
        later = "; it is still running: try again later" if view.is_running else ""
        raise UsageError(f"run {view.run_id} has logged no metrics{later}")
    for name in wanted:
        if name not in known:
            raise UsageError(f'run {view.run_id} has no metric "{shorten(name)}"; {did_you_mean(name, known)}')
    losses = [name for name in known if "loss" in PurePosixPath(name).name]
    return list(dict.fromkeys(wanted)) or losses or known


def _x_name(series: Sequence[Series]) -> str:
    for name in ("step", "epoch"):
        if all(None not in getattr(rank_series, name) for rank_series in series):
            return name
    return "time_s"


def _curve(name: str, series: dict[tuple[str, int], Series], x_name: str) -> Curve:
    start = min((rank_series.time_s[0] for rank_series in series.values()), default=0.0)
    ranks = {
        rank: _points(rank_series, x_name, start)
        for (metric, rank), rank_series in sorted(series.items())
        if metric == name
    }
    first = next(iter(ranks.values()))
    if all(_equal(points, first) for points in ranks.values()):
        return Curve(name, {next(iter(ranks)): first}, first)
    return Curve(name, ranks, thinned(_mean(list(ranks.values()))))


def _points(series: Series, x_name: str, start: float) -> Points:
    if x_name == "time_s":
        x = [time_s - start for time_s in series.time_s]
    else:
        x = [value for value in getattr(series, x_name) if value is not None]
    return thinned((x, series.value))


def _equal(one: Points, other: Points) -> bool:
    return one[0] == other[0] and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one[1], other[1], strict=True)
    )


def thinned(points: Points) -> Points:
    """At most _MOST_POINTS points; neighbours are replaced by their mean."""
    size = math.ceil(len(points[0]) / _MOST_POINTS)
    if size <= 1:
        return points
    starts = range(0, len(points[0]), size)
    x, y = points
    return [mean_of(x[at : at + size]) for at in starts], [mean_of(y[at : at + size]) for at in starts]


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _mean(ranks: Sequence[Points]) -> Points:
    """At each x the mean over the ranks that have a value there, in the order of x."""
    at: dict[float, list[float]] = {}
    for x, y in ranks:
        for place, value in zip(x, y, strict=True):
            at.setdefault(place, []).append(value)
    places = sorted(at)
    return places, [mean_of(at[place]) for place in places]


def plot_data(plot: Plot) -> list[dict[str, object]]:
    """Return the curves as plain data, for --json: each metric of each rank, and their mean."""
    data: list[dict[str, object]] = []
    for curve in (curve for panel in plot.panels for curve in panel.curves):
        rows: list[tuple[int | str, Points]] = [*curve.ranks.items()]
        if curve.is_mean:
            rows.append(("mean", curve.main))
        data += [{"name": curve.name, "rank": rank, "x": x, "y": y} for rank, (x, y) in rows]
    return data
