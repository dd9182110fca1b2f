"""The curves of a run: which to show, against what, one per rank and their mean; and their drawing as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.results.metrics import Series, read_series
from ddptrain.results.run import Run
from ddptrain.results.system import PREFIX, read_system, system_series
from ddptrain.text_tables import clean_line

Points = tuple[list[float], list[float]]
_MOST_POINTS = 2000
_ASCII_MARKS = "*o+x#@"
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red: readable on dark and on light
_NARROWEST = 40
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of the character's row and column


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
    names = _chosen_names(view, sorted({name for name, _ in series}), metrics)
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
    start = min(rank_series.time_s[0] for rank_series in series.values())
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


# --- As text ---


@dataclass(frozen=True, slots=True)
class Style:
    """What the output can show: columns, rows of a chart, braille dots, and colours."""

    width: int = 80
    height: int = 16
    unicode: bool = False
    colour: bool = False


def terminal_charts(plot: Plot, style: Style) -> str:
    """Return the curves as text, a chart for each panel, none wider than `style.width` columns (at least 40)."""
    x_name = "seconds" if plot.x_name == "time_s" else plot.x_name
    return "\n\n".join(_chart(panel, x_name, style) for panel in plot.panels)


def _chart(panel: Panel, x_name: str, style: Style) -> str:
    title = clean_line(panel.quantity)
    points = [point for curve in panel.curves for point in zip(*curve.main, strict=True) if _is_finite(point)]
    if not points:
        return f"{title}\n(no finite values)"
    x_range, y_range = [(min(values), max(values)) for values in zip(*points, strict=True)]
    low, middle, high = _number(y_range[0]), _number(y_range[0] / 2 + y_range[1] / 2), _number(y_range[1])
    margin = max(map(len, (low, middle, high)))
    width, height = max(_NARROWEST, style.width) - margin - 2, max(5, style.height)
    dots_x, dots_y = (2, 4) if style.unicode else (1, 1)
    cells: dict[tuple[int, int], tuple[int, int]] = {}  # (row, column) -> (dots, the last curve that has one there)
    for index, curve in enumerate(panel.curves):
        for x, y in _dots_of(curve.main, (x_range, width * dots_x - 1), (y_range, height * dots_y - 1)):
            row = height * dots_y - 1 - y
            cell = row // dots_y, x // dots_x
            cells[cell] = cells.get(cell, (0, 0))[0] | _DOTS[row % dots_y][x % dots_x], index
    side, corner, floor = ("│", "└", "─") if style.unicode else ("|", "+", "-")
    ticks = {height // 2: middle} if low == high else {0: high, height // 2: middle, height - 1: low}
    rows = []
    for row in range(height):
        line = [_painted(*cells.get((row, column), (0, 0)), style) for column in range(width)]
        rows.append(f"{ticks.get(row, ''):>{margin}} {side}{''.join(line).rstrip()}")
    left, right = map(_number, x_range)
    room = width - len(left) - len(right)
    legend = [f"{_painted(0x24, index, style) * 2} {_legend(curve)}" for index, curve in enumerate(panel.curves)]
    axis = [f"{'':>{margin}} {corner}{floor * width}", f"{'':>{margin}}  {left}{x_name[:room]:^{room}}{right}"]
    return "\n".join((title, *rows, *axis, *legend))


def _dots_of(
    points: Points, across: tuple[tuple[float, float], int], up: tuple[tuple[float, float], int]
) -> Iterator[tuple[int, int]]:
    """Yield the dots of a line through the points, from the lower left corner; it has a gap where one is not finite.

    across, up: the range of the values, and the number of the last dot.
    """
    pairs = list(zip(*points, strict=True))
    for start, end in zip(pairs, [*pairs[1:], *pairs[-1:]], strict=True):
        if _is_finite(start):
            (x, x_end), (y, y_end) = (
                [round(_share(value, bounds) * last) for value in values]
                for values, (bounds, last) in zip(
                    zip(start, end if _is_finite(end) else start, strict=True), (across, up), strict=True
                )
            )
            count = max(abs(x_end - x), abs(y_end - y), 1)
            for step in range(count + 1):
                yield x + round((x_end - x) * step / count), y + round((y_end - y) * step / count)


def _is_finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _share(value: float, bounds: tuple[float, float]) -> float:
    """The place of a value between the bounds, 0 to 1; halved first, so that the widest range does not overflow."""
    span = bounds[1] / 2 - bounds[0] / 2
    return (value / 2 - bounds[0] / 2) / span if span > 0 else 0.5


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"


def _painted(dots: int, index: int, style: Style) -> str:
    if not dots:
        return " "
    text = chr(_BRAILLE + dots) if style.unicode else _ASCII_MARKS[index % len(_ASCII_MARKS)]
    return f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{text}\x1b[0m" if style.colour else text


def _legend(curve: Curve) -> str:
    last = next((value for value in reversed(curve.main[1]) if value == value), None)
    return clean_line(curve.label) + ("" if last is None else f": {last:.4g}")
