"""Computes the newest value of each metric, one number for all ranks, for run.json and the end-of-run summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from ddptrain.results.metrics import AllSeries


@dataclass(slots=True)
class _Latest:
    """One metric at its newest step. by_rank: logged values; saved: the value of a checkpoint."""

    step: int | None
    by_rank: dict[int, float] = field(default_factory=dict)
    saved: float | None = None
    is_old: bool = False  # of an earlier attempt: any new value replaces it

    @property
    def value(self) -> float:
        if self.by_rank:
            return sum(self.by_rank.values()) / len(self.by_rank)
        return math.nan if self.saved is None else self.saved


class LatestMetrics:
    """Defines `last_metrics`: the value of each metric at its newest step.

    It is the mean over the ranks that logged the metric at this step, as in the curves; if none did, the value of the
    checkpoint of this step. A value logged without a step is newer than all earlier values of its rank.
    """

    def __init__(self) -> None:
        self._latest: dict[str, _Latest] = {}

    @classmethod
    def of(cls, series: AllSeries, saved: Iterable[tuple[int, Mapping[str, float]]]) -> Self:
        """Return the values of a run from the metrics of its ranks, and the steps and metrics of its checkpoints."""
        latest = cls()
        for (name, rank), rank_series in series.items():
            for step, value in zip(rank_series.step, rank_series.value, strict=True):
                if not math.isnan(value):
                    latest.logged(rank, None if step is None else int(step), {name: value})
        for step, metrics in saved:
            latest.saved(step, metrics)
        return latest

    def begin_attempt(self, known: Mapping[str, float | None] | None = None) -> None:
        """Begin an attempt, whose steps may start again at a lower number; `known`: the values of a resumed run."""
        for name, value in (known or {}).items():
            if value is not None:
                self._latest[name] = _Latest(None, saved=value)
        for latest in self._latest.values():
            latest.is_old = True

    def logged(self, rank: int, step: int | None, values: Mapping[str, float]) -> None:
        """Add values that a rank has logged."""
        for name, value in values.items():
            if (latest := self._at(name, step)) is not None:
                latest.by_rank[rank] = value

    def saved(self, step: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a checkpoint."""
        for name, value in values.items():
            if (latest := self._at(name, step)) is not None:
                latest.saved = value

    def as_dict(self) -> dict[str, float]:
        """Return the values for run.json."""
        return {name: latest.value for name, latest in self._latest.items()}

    def _at(self, name: str, step: int | None) -> _Latest | None:
        """Return the metric at this step; None if a newer step is known."""
        latest = self._latest.get(name)
        if latest is None or latest.is_old or (step is not None and (latest.step is None or step > latest.step)):
            latest = self._latest[name] = _Latest(step)
        return None if step is not None and latest.step is not None and step < latest.step else latest
