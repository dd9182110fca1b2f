"""What is measured: variants, run in turns, and the rows of the table that compare two of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from tests.bench.stage import Stage

Figures = Mapping[str, float]
Variants = Mapping[str, Callable[[], Figures]]


class NotHere(Exception):
    """Rows that can't be measured on this machine; says why."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row is to reach: its ratio of medians, or the median of ours."""

    of: Literal["ratio", "ours"]
    relation: Literal["<=", ">="]
    bound: float

    def __str__(self) -> str:
        return f"{self.of} {self.relation} {self.bound:g}"

    def reached(self, value: float) -> bool:
        """Whether `value` is on the right side of the bound."""
        return value <= self.bound if self.relation == "<=" else value >= self.bound


@dataclass(frozen=True, slots=True)
class Source:
    """Where a row's figures come from: one figure of one variant."""

    variant: str
    figure: str


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; without a goal it only explains another one."""

    name: str
    unit: str
    ours: Source
    peer: Source | None
    peer_name: str
    goal: Goal | None
    what: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """Rows that are measured in turns; `open` prepares the variants and tidies up after them."""

    rows: tuple[Row, ...]
    open: Callable[[Stage], AbstractContextManager[Variants]]


@dataclass(frozen=True, slots=True)
class Spread:
    """The figures of some runs."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Result:
    """A row with its figures, or with why it has none."""

    row: Row
    ours: Spread | None = None
    peer: Spread | None = None
    error: str = ""
    skipped: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours by the peer's, of the medians."""
        return self.ours.median / self.peer.median if self.ours and self.peer and self.peer.median else None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None where there is none, or no figure."""
        if self.row.goal is None or self.ours is None:
            return None
        value = self.ours.median if self.row.goal.of == "ours" else self.ratio
        return None if value is None else self.row.goal.reached(value)


@dataclass
class Records:
    """Every figure of every run: variant -> figure -> values in the order in which they were measured."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, variant: str, figures: Figures) -> None:
        """Takes what one run of a variant gave."""
        for figure, value in figures.items():
            self.values.setdefault(variant, {}).setdefault(figure, []).append(value)

    def spread(self, source: Source | None) -> Spread | None:
        """The figures behind one side of a row."""
        found = self.values.get(source.variant, {}).get(source.figure) if source else None
        return Spread(tuple(found)) if found else None


def measure(
    experiment: Experiment, chosen: Sequence[Row], runs: int, stage: Stage, say: Callable[[str], None]
) -> tuple[list[Result], Records]:
    """Run the variants that the chosen rows need, in turns; a variant that fails takes its rows along, no others."""
    records = Records()
    failed: dict[str, str] = {}
    needed = {source.variant for row in chosen for source in (row.ours, row.peer) if source}
    try:
        with experiment.open(stage) as variants:
            turns = [name for name in variants if name in needed]
            for number in range(1, runs + 1):
                for name in turns:
                    if name in failed:
                        continue
                    try:
                        figures = variants[name]()
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
    return [_result(row, records, failed) for row in chosen], records


def _result(row: Row, records: Records, failed: Mapping[str, str]) -> Result:
    sources = [source for source in (row.ours, row.peer) if source]
    errors = [f"{source.variant}: {failed[source.variant]}" for source in sources if source.variant in failed]
    return Result(row, records.spread(row.ours), records.spread(row.peer), "; ".join(errors))
