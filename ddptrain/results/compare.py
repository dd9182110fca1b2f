"""Compares runs: what differs in configuration, code, data and versions, each metric, and the curves."""

from __future__ import annotations

import itertools
import json
import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddptrain.config.rank_settings import goal_of
from ddptrain.config.wording import counted, did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file
from ddptrain.results.metrics import AllSeries, read_series
from ddptrain.results.recorded_config import config_of, params_of
from ddptrain.results.run import Run
from ddptrain.results.selection import best_value, value_text
from ddptrain.results.show.curves import Curve, Panel, Plot, Points, mean_of, thinned
from ddptrain.results.show.render import HEADER, rows
from ddptrain.text_tables import clean_line, number, plain_table

_MOST_PANELS = 6  # if no metric is a loss
_HASH_CHARACTERS = 12
_LONGEST_VALUE = 32
_MOST_ROWS = 60  # of a section; --json has all
_NOTE_CHARACTERS = 60
Axis = Literal["step", "epoch"]
Values = tuple[float | None, ...]  # one for each run
Differences = dict[str, list[Any]]  # by name: the value of each run, None if the run has none


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

    views: tuple[Run, ...]
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


def compare_runs(views: Sequence[Run], axis: Axis | None = None, metrics: Sequence[str] = ()) -> Comparison:
    """Compare runs. `metrics` names the metrics to draw; by default the losses, or else the first six metrics.

    Raises UsageError for one run, an unknown metric, or a run without values on the axis; ResultsError.
    """
    if len({view.where for view in views}) < 2:
        raise UsageError(f"give at least two different runs to compare, not only {views[0].run_id}")
    series = [read_series(view.metrics_jsonl) for view in views]
    compared = [_metric(name, views, series) for name in _names(views, series)]
    return Comparison(tuple(views), find_differences(views), tuple(compared), _plot(views, series, axis, metrics))


def labels(views: Sequence[Run]) -> list[str]:
    """Return a short label for each run: A, B, ... Z, AA, AB, ..."""
    lengths = itertools.count(1)
    every = (letters for length in lengths for letters in itertools.product(string.ascii_uppercase, repeat=length))
    return ["".join(letters) for letters in itertools.islice(every, len(views))]


def _names(views: Sequence[Run], series: Sequence[AllSeries]) -> list[str]:
    logged = {name for run_series in series for name, _ in run_series}
    best = {view.record.best.metric for view in views if view.record.best is not None}
    return sorted(logged.union(best, *(view.record.last_metrics for view in views)))


def _metric(name: str, views: Sequence[Run], series: Sequence[AllSeries]) -> MetricComparison:
    modes = [view.record.best.mode for view in views if view.record.best and view.record.best.metric == name]
    goal = goal_of(name, name if modes else "", modes[0] if modes else "min")
    last = tuple(view.record.numbers.get(name) for view in views)
    best = (
        tuple(best_value(view, name, run_series, goal) for view, run_series in zip(views, series, strict=True))
        if goal
        else ()
    )
    return MetricComparison(name, goal, last, best or (None,) * len(views))


def _plot(views: Sequence[Run], series: Sequence[AllSeries], axis: Axis | None, wanted: Sequence[str]) -> Plot:
    known = sorted({name for run_series in series for name, _ in run_series})
    for name in wanted:
        if name not in known:
            raise UsageError(f'none of the runs has logged "{shorten(name)}"; {did_you_mean(name, known)}')
    losses = [name for name in known if "loss" in name.rpartition("/")[2]]
    names = list(dict.fromkeys(wanted)) or losses or known[:_MOST_PANELS]
    chosen = axis or _best_axis(series, names)
    panels = []
    for name in names:
        curves = []
        for label, view, run_series in zip(labels(views), views, series, strict=True):
            if (points := _points(view, run_series, name, chosen)) is not None:
                curves.append(Curve(f"{label} {view.run_id}", {0: points}, points))
        panels.append(Panel(name, tuple(curves)))
    return Plot(f"{len(views)} runs", f"by {chosen}", chosen, tuple(panels))


def _best_axis(runs: Sequence[AllSeries], metrics: Sequence[str]) -> Axis:
    """Return epoch if some of the metrics' values have no step, and all have an epoch; otherwise step."""
    chosen = [rank_series for series in runs for (name, _), rank_series in series.items() if name in metrics]
    has_all_steps = all(None not in rank_series.step for rank_series in chosen)
    return "epoch" if not has_all_steps and all(None not in each.epoch for each in chosen) else "step"


def _points(view: Run, series: AllSeries, metric: str, axis: Axis) -> Points | None:
    """Return the points of a run's metric, mean over the ranks; None if the run does not have it.

    A value without a step gets the number of the ctx.log call. Raises UsageError if no value has an epoch.
    """
    ranks = [rank_series for (name, _), rank_series in series.items() if name == metric]
    if not ranks:
        return None
    at: dict[float, list[float]] = {}
    for rank_series in ranks:
        positions = rank_series.epoch if axis == "epoch" else rank_series.step
        for call, (x, y) in enumerate(zip(positions, rank_series.value, strict=True)):
            if x is not None or axis == "step":
                at.setdefault(call if x is None else x, []).append(y)
    if not at:
        raise UsageError(f"run {view.run_id} has logged {metric} without epoch; choose another --align")
    places = sorted(at)
    return thinned((places, [mean_of(at[place]) for place in places]))


def find_differences(views: Sequence[Run]) -> dict[str, Differences]:
    """Return what is not the same in all runs, by section; a section in which nothing differs is empty."""
    return {section: differing([dict(flat(facts(view))) for view in views]) for section, facts in _SECTIONS.items()}


def differing(values: Sequence[Mapping[str, Any]]) -> Differences:
    """Return the names whose values differ between the mappings, in the order in which the names first occur."""
    names = dict.fromkeys(name for mapping in values for name in mapping)
    rows = {name: [mapping.get(name) for mapping in values] for name in names}
    return {name: row for name, row in rows.items() if len({_comparable(value) for value in row}) > 1}


def flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with names such as optimizer.lr. A list is one value."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, values


def _comparable(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _config(view: Run) -> Mapping[str, Any]:
    return {key: value for key, value in config_of(view).items() if key not in ("params", "workload")}


def _code(view: Run) -> Mapping[str, Any]:
    record = view.record
    facts: dict[str, Any] = {"workload": record.workload}
    if record.git is not None:
        facts["git commit"] = record.git.commit[:_HASH_CHARACTERS]
        facts["uncommitted changes"] = record.git.dirty
    if record.code is not None:
        facts["uploaded code"] = record.code.hash[:_HASH_CHARACTERS]
        facts["uploaded files"] = record.code.files
    return facts


def _data(view: Run) -> Mapping[str, Any]:
    """Return the SHA-256 of each file that describes the inputs, such as the list of images in inputs/manifest.json."""
    facts = {}
    try:
        paths = sorted(path for path in view.fetch("inputs/*.json").inputs_dir.iterdir() if path.suffix == ".json")
    except OSError:
        return {}
    for path in paths:
        try:
            facts[path.name] = f"sha256 {hash_file(path, safely=True)[1][:_HASH_CHARACTERS]}"
        except OSError:
            continue
    return facts


def _environment(view: Run) -> Mapping[str, Any]:
    record = view.record
    ranks = record.attempts[-1].ranks if record.attempts else ()
    facts: dict[str, Any] = {"ranks": record.world_size, "hosts": sorted({rank.host for rank in ranks})}
    facts["GPUs"] = sum(rank.gpu is not None for rank in ranks)
    return facts | {name: item.value for name, item in sorted(record.rank_environment.items())}


_SECTIONS: Mapping[str, Callable[[Run], Mapping[str, Any]]] = {
    "params": params_of,
    "config": _config,
    "code": _code,
    "data": _data,
    "versions": lambda view: view.record.versions,
    "environment": _environment,
}


def comparison_text(comparison: Comparison) -> str:
    """Return the runs, what differs, and the metrics, in columns A, B, ...; curves are left out."""
    tables = [_runs(comparison)]
    same = []
    for section, differences in comparison.differences.items():
        if differences:
            tables.append(_differences(section, differences, labels(comparison.views)))
        else:
            same.append(section)
    if same:
        tables.append(f"no differences, or not recorded: {', '.join(same)}")
    if comparison.metrics:
        tables.append(_metrics(comparison))
    return "\n\n".join(tables)


def _runs(comparison: Comparison) -> str:
    views = comparison.views
    annotated = [view.annotations for view in views]
    table = [["", *HEADER, "TAGS", "NOTE"]]
    for label, row, marks in zip(labels(views), rows(views), annotated, strict=True):
        table.append([label, *row, " ".join(marks.tags), value_text(marks.note or None, _NOTE_CHARACTERS)])
    for title, cells in (("TAGS", [marks.tags for marks in annotated]), ("NOTE", [marks.note for marks in annotated])):
        if not any(cells):
            column = table[0].index(title)
            table = [row[:column] + row[column + 1 :] for row in table]
    return plain_table([[clean_line(cell) for cell in row] for row in table])


def _differences(section: str, differences: Differences, names: Sequence[str]) -> str:
    table = [[section, *names]]
    for name, values in list(differences.items())[:_MOST_ROWS]:
        table.append([clean_line(f"  {name}"), *(clean_line(value_text(value, _LONGEST_VALUE)) for value in values)])
    more = len(differences) - _MOST_ROWS
    return plain_table(table) + (f"\n  and {counted(more, 'more difference')}: see --json" if more > 0 else "")


def _metrics(comparison: Comparison) -> str:
    table = [["metrics", "", *labels(comparison.views)]]
    for metric in comparison.metrics[:_MOST_ROWS]:
        table.append([clean_line(f"  {metric.name}"), "last", *_values(metric.last)])
        if metric.goal:
            table.append(["", f"best ({metric.goal})", *_best(metric)])
    more = len(comparison.metrics) - _MOST_ROWS
    return plain_table(table) + (f"\n  and {counted(more, 'more metric')}: see --json" if more > 0 else "")


def _values(values: Values) -> list[str]:
    """Return each value with its difference to the first value."""
    return [
        number(value) + (f" ({change:+.4g})" if place and change is not None and math.isfinite(change) else "")
        for place, (value, change) in enumerate(zip(values, changes(values), strict=True))
    ]


def _best(metric: MetricComparison) -> list[str]:
    """Return what _values returns, with a mark at the best run."""
    return [text + (" *" if place == metric.winner else "") for place, text in enumerate(_values(metric.best))]
