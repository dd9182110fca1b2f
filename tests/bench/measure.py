"""Variants, which are run alternately, and the rows of the table that compare two of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.bench.stage import Stage

Figures = Mapping[str, float]
Variants = Mapping[str, Callable[[], Figures]]


class NotHere(Exception):
    """A row cannot be measured on this machine, with the reason."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a row: a bound of the ratio of medians, or of ddptrain's median."""

    of: Literal["ratio", "ours"]
    relation: Literal["<=", ">="]
    bound: float

    def __str__(self) -> str:
        return f"{self.of} {self.relation} {self.bound:g}"

    def reached(self, value: float) -> bool:
        """Whether `value` reaches the goal."""
        return value <= self.bound if self.relation == "<=" else value >= self.bound


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a row's values: one figure of one variant."""

    variant: str
    figure: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. A row without a goal only explains another one."""

    name: str
    unit: str
    ours: Source
    peer: Source | None
    peer_name: str
    goal: Goal | None
    what: str
    chosen_with: str = ""  # the row with which it is chosen


@dataclass(frozen=True, slots=True)
class Experiment:
    """Rows whose variants are run alternately. `open` prepares the variants and cleans up after them.

    slow: variants that take minutes, and are run fewer times.
    """

    rows: tuple[Row, ...]
    open: Callable[[Stage], AbstractContextManager[Variants]]
    slow: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of several runs."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Result:
    """A row with its values, or with the reason why it has none."""

    row: Row
    ours: Spread | None = None
    peer: Spread | None = None
    error: str = ""
    skipped: str = ""

    @property
    def ratio(self) -> float | None:
        """The ratio of the medians, ddptrain's by the peer's."""
        return self.ours.median / self.peer.median if self.ours and self.peer and self.peer.median else None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal or a value."""
        if self.row.goal is None or self.ours is None:
            return None
        value = self.ours.median if self.row.goal.of == "ours" else self.ratio
        return None if value is None else self.row.goal.reached(value)


@dataclass
class Records:
    """All values: variant -> figure -> values in the order of measurement."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, variant: str, figures: Figures) -> None:
        """Add the figures of one run of a variant."""
        for figure, value in figures.items():
            self.values.setdefault(variant, {}).setdefault(figure, []).append(value)

    def spread(self, source: Source | None) -> Spread | None:
        """The values of one side of a row."""
        found = self.values.get(source.variant, {}).get(source.figure) if source else None
        return Spread(tuple(found)) if found else None


def measure(
    experiment: Experiment,
    chosen: Sequence[Row],
    runs: int,
    stage: Stage,
    say: Callable[[str], None],
    slow_runs: int = 1,
) -> tuple[list[Result], Records]:
    """Run the variants of the chosen rows alternately. A variant that fails affects only its own rows."""
    records = Records()
    failed: dict[str, str] = {}
    absent: dict[str, str] = {}
    needed = {source.variant for row in chosen for source in (row.ours, row.peer) if source}
    try:
        with experiment.open(stage) as variants:
            turns = [name for name in variants if name in needed]
            for number in range(1, runs + 1):
                for name in turns:
                    if name in failed or name in absent or (name in experiment.slow and number > slow_runs):
                        continue
                    try:
                        figures = variants[name]()
                    except NotHere as reason:
                        absent[name] = str(reason)
                        say(f"{name} is left out: {reason}")
                        continue
                    except Exception as error:
                        failed[name] = f"{type(error).__name__}: {error}"
                        say(f"{name} failed: {failed[name]}")
                        continue
                    records.add(name, figures)
                    say(f"{name}, run {number} of {runs}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()))
    except NotHere as reason:
        say(f"skipped: {reason}")
        return [Result(row, skipped=str(reason)) for row in chosen], records
    except Exception as error:
        failed |= dict.fromkeys(needed, f"{type(error).__name__}: {error}")
        say(f"failed: {error}")
    return [_result(row, records, failed, absent) for row in chosen], records


def beside(experiment: Experiment, rows: Sequence[Row], other: Stage) -> tuple[Experiment, list[Row]]:
    """The same measurements of ddptrain, compared with those on another stage, which has another version's command."""

    @contextmanager
    def open_both(stage: Stage) -> Iterator[Variants]:
        with experiment.open(stage) as ours, experiment.open(other) as others:
            yield {**ours, **{f"other-{name}": run for name, run in others.items()}}

    return replace(experiment, open=open_both), [_beside(row) for row in rows]


def _beside(row: Row) -> Row:
    more_is_better = row.goal is not None and row.goal.relation == ">="
    goal = Goal("ratio", ">=", 0.97) if more_is_better else Goal("ratio", "<=", 1.03)
    other = Source(f"other-{row.ours.variant}", row.ours.figure)
    return replace(row, peer=other, peer_name="the other version", goal=goal)


def _result(row: Row, records: Records, failed: Mapping[str, str], absent: Mapping[str, str]) -> Result:
    sources = [source for source in (row.ours, row.peer) if source]
    errors = [f"{source.variant}: {failed[source.variant]}" for source in sources if source.variant in failed]
    skipped = "; ".join(absent[source.variant] for source in sources if source.variant in absent)
    return Result(row, records.spread(row.ours), records.spread(row.peer), "; ".join(errors), skipped)
