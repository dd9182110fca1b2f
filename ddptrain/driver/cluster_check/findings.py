"""The findings of a check, and the comparison of a host with other hosts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

_Value = TypeVar("_Value", bound=Hashable)
_MIN_HOSTS = 3  # for a comparison with the median: of two values, it is unknown which one is wrong


class Level(StrEnum):
    """bad: the host is not fit for a run. warning: the user should know it."""

    BAD = "bad"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. host: its address in the cluster, "" for all hosts. hint: what to do, or ""."""

    level: Level
    host: str
    subject: str
    text: str
    hint: str = ""
    other: str = ""  # the second host of a pair: either of the two may be at fault
    of_limit: float = 0.0  # a bad value divided by the lowest value that is not bad; 0: not a slow measurement


@dataclass(frozen=True, slots=True)
class Limits:
    """The fractions of the median below which a value is bad, or deserves a warning."""

    bad: float
    warning: float


def below_median(
    values: Mapping[str, float], subject: str, unit: str, limits: Limits, *, hint: str = ""
) -> Iterable[Finding]:
    """Yield a finding for each host whose value is clearly below the median, if there are at least three hosts."""
    if len(values) < _MIN_HOSTS:
        return
    median = statistics.median(values.values())
    for host, value in values.items():
        if median > 0 and value < limits.warning * median:
            level = Level.BAD if value < limits.bad * median else Level.WARNING
            text = f"{value:.3g} {unit}, {100 * value / median:.0f} % of the median of {len(values)} ({median:.3g})"
            of_limit = value / (limits.bad * median) if limits.bad else 0.0
            yield Finding(level, host, subject, text, hint, of_limit=of_limit)


def usual(values: Iterable[_Value]) -> _Value | None:
    """Return the most frequent value; None if there are no values, or if two values are equally frequent."""
    counts = Counter(values).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return None
    return counts[0][0]
