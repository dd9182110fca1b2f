"""The values of runs by name: status, duration, parameters, metrics. For conditions, sorting and columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ddptrain.results.errors import ResultsError
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import AllSeries, read_series
from ddptrain.results.select.expression import Field
from ddptrain.results.select.recorded_config import params_of
from ddptrain.tracking.metric_goals import goal_of

PARAMS = "params."


def _age_s(view: RunView) -> float | None:
    started = parse_time(view.record.started_at)
    return None if started is None else (datetime.now(UTC) - started).total_seconds()


def _failure(view: RunView) -> str | None:
    failure = view.record.failure
    return None if failure is None else failure.summary


FIELDS: Mapping[str, Callable[[RunView], Any]] = {
    "run": lambda view: view.run_id,
    "name": lambda view: view.record.name,
    "workload": lambda view: view.record.workload,
    "status": lambda view: str(view.shown_status),
    "started": lambda view: view.record.started_at or None,
    "ended": lambda view: view.record.ended_at,
    "duration": lambda view: view.duration_s,
    "age": _age_s,
    "ranks": lambda view: view.record.world_size or None,
    "attempts": lambda view: len(view.record.attempts),
    "exit_code": lambda view: view.record.exit_code,
    "failure": _failure,
    "commit": lambda view: view.record.git.commit if view.record.git is not None else None,
    "tags": lambda view: list(view.annotations.tags),
    "note": lambda view: view.annotations.note or None,
}


class RunFields:
    """Looks up the values of one run; files besides run.json are read when they are needed, once."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self._known: dict[Field, Any] = {}

    def __call__(self, field: Field) -> Any:
        """Return the value of a field; None if the run does not have it."""
        if field not in self._known:
            self._known[field] = self._find(field)
        return self._known[field]

    def _find(self, field: Field) -> Any:
        if field.kind == "best":
            return best_value(self.view, field.name)
        if field.kind == "" and field.name in FIELDS:
            return FIELDS[field.name](self.view)
        if field.kind == "" and field.name.startswith(PARAMS):
            return _below(params_of(self.view), field.name.removeprefix(PARAMS))
        return self.view.record.numbers.get(field.name)


def _below(values: Any, path: str) -> Any:
    """Return the value at a path such as optimizer.lr; a key may contain dots itself."""
    if not isinstance(values, dict):
        return None
    if path in values:
        return values[path]
    key, _, rest = path.partition(".")
    return _below(values.get(key), rest) if rest else None


def best_value(view: RunView, metric: str, series: AllSeries | None = None, goal: str = "") -> float | None:
    """Return the best value of a metric: of the run's best checkpoint, or else of metrics.jsonl, mean over the ranks.

    None if the run does not have it, or if it is not known whether it should be small or large. `series` are the
    metrics of the run, if the caller has read them; `goal` is min or max, if the caller knows it.
    """
    best = view.record.best
    if best is not None and best.metric == metric:
        return best.value if math.isfinite(best.value) else None
    goal = goal or goal_of(metric)
    if not goal:
        return None
    if series is None:
        try:
            series = read_series(view.layout.metrics_jsonl, view.record.attempts)
        except ResultsError:
            return None
    values = filter(math.isfinite, _rank_means(series, metric))
    return min(values, default=None) if goal == "min" else max(values, default=None)


def _rank_means(series: AllSeries, metric: str) -> list[float]:
    """Return the mean over the ranks at each step, or for values without a step, at each call."""
    by_step: dict[float | str, list[float]] = {}
    for (name, _), rank_series in series.items():
        if name == metric:
            for number, (step, value) in enumerate(zip(rank_series.step, rank_series.value, strict=True)):
                by_step.setdefault(f"call {number}" if step is None else step, []).append(value)
    return [sum(values) / len(values) for values in by_step.values()]
