"""The value of a sweep's metric: at each step while a trial runs, and of a run that has ended."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ddptrain.results.checkpoints.verification import read_manifest
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import RunLayout, checkpoint_folders
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import read_series


class LiveMetric:
    """Joins what ranks log to one value a step, as soon as it is complete.

    A step is complete if a checkpoint has the value, if all ranks have logged it, if all those have logged it that
    logged the step before, or if a later step begins. The value is that of the checkpoint, else the mean of the ranks.
    """

    def __init__(self, world_size: int = 0, usual: frozenset[int] = frozenset()) -> None:
        """`usual`: the ranks that log the metric, as an earlier trial has shown; none if that is not known."""
        self.world_size = world_size
        self.usual = usual
        self.last_step: float = -math.inf
        self._step: float | None = None
        self._values: dict[int, float] = {}
        self._counts: dict[int, int] = defaultdict(int)

    def logged(self, rank: int, step: int | None, value: float) -> list[tuple[float, float]]:
        """Add a value that a rank has logged; return the steps that are now complete, with their values."""
        self._counts[rank] += 1
        at = float(self._counts[rank] if step is None else step)
        complete = self._begin(at)
        if at == self._step:
            self._values[rank] = value
            if len(self._values) == self.world_size or (self.usual and self.usual <= self._values.keys()):
                complete += self._complete()
        return complete

    def saved(self, step: int, value: float) -> list[tuple[float, float]]:
        """Add the value of a checkpoint."""
        complete = self._begin(float(step))
        if float(step) == self._step:
            usual, self._values = self.usual, {-1: value}
            complete += self._complete()
            self.usual = usual  # a checkpoint does not say which ranks log
        return complete

    def finish(self) -> list[tuple[float, float]]:
        """Return the steps that are not returned yet, with their values: the run has ended."""
        return self._complete()

    def _begin(self, step: float) -> list[tuple[float, float]]:
        """Begin a later step; an earlier one, which a restart repeats, is ignored."""
        if step <= self.last_step or step == self._step or (self._step is not None and step < self._step):
            return []
        complete = self._complete()
        self._step = step
        return complete

    def _complete(self) -> list[tuple[float, float]]:
        if self._step is None or not self._values:
            return []
        value = sum(self._values.values()) / len(self._values)
        complete = [(self._step, value)]
        self.usual, self.last_step = frozenset(self._values), self._step
        self._step, self._values = None, {}
        return complete


def values_by_step(logged: Iterable[tuple[float, float]], saved: Mapping[float, float]) -> dict[float, float]:
    """Return the value of each step: that of a checkpoint, else the mean of what ranks have logged."""
    found: dict[float, list[float]] = defaultdict(list)
    for step, value in logged:
        found[step].append(value)
    means = {step: sum(values) / len(values) for step, values in found.items()}
    return dict(sorted({**means, **saved}.items()))


def values_of_run(view: RunView, metric: str, saved: Mapping[float, float]) -> dict[float, float]:
    """Return the values of a metric in a run, by step; values that were logged without a step are counted.

    `saved`: step -> the value that its checkpoint has.
    """
    series = read_series(view.layout.metrics_jsonl, view.record.attempts)
    logged = [
        (float(number if step is None or math.isnan(step) else step), value)
        for (name, _), one in series.items()
        if name == metric
        for number, (step, value) in enumerate(zip(one.step, one.value, strict=True), 1)
    ]
    best = view.record.best
    known = {float(best.step): best.value} if best is not None and best.metric == metric else {}
    return values_by_step(logged, {**saved, **known})


def saved_values(layout: RunLayout, metric: str) -> dict[float, float]:
    """Return the values of a metric in the checkpoints of a run directory, by step."""
    saved: dict[float, float] = {}
    for folder in checkpoint_folders(layout):
        with suppress(ResultsError):
            manifest = read_manifest(folder)
            if metric in manifest.metrics:
                saved[float(manifest.step)] = manifest.metrics[metric]
    return saved


def best_value(values: Iterable[float], mode: str) -> float | None:
    """Return the lowest (mode min) or highest finite value; None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite) if mode == "min" else max(finite)) if finite else None
