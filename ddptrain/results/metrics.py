"""Reads metrics.jsonl: as it grows, and without minding a line that is half written or damaged."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddptrain.results.errors import naming
from ddptrain.results.files import open_to_read

_POSITION = frozenset(("time_s", "step", "epoch", "rank"))


@dataclass(frozen=True, slots=True)
class MetricLine:
    """Numbers that a rank logged at one time; a value is None where it was NaN or infinite."""

    time_s: float
    step: float | None
    epoch: float | None
    rank: int
    values: dict[str, float | None]


@dataclass(slots=True)
class Series:
    """One metric of one rank, as it was logged; the lists are equally long, a missing value is NaN."""

    time_s: list[float] = field(default_factory=list)
    step: list[float | None] = field(default_factory=list)
    epoch: list[float | None] = field(default_factory=list)
    value: list[float] = field(default_factory=list)


class MetricsReader:
    """Reads the lines that have come since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[MetricLine]:
        """The new whole lines; none while there is no file. A last line that is not ended yet waits for its end.

        Raises ResultsError where the file can't be read.
        """
        with naming(self._path, "read"):
            try:
                descriptor = open_to_read(self._path)
            except FileNotFoundError:
                return []
            with os.fdopen(descriptor, "rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0  # written anew
                file.seek(self._offset)
                data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line for raw in whole.split(b"\n") if (line := _parse(raw)) is not None]


def _parse(raw: bytes) -> MetricLine | None:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("rank"), int):
        return None
    values = {
        name: _number(value)
        for name, value in fields.items()
        if name not in _POSITION and (value is None or _is_number(value))
    }
    return MetricLine(
        _number(fields.get("time_s")) or 0.0,
        _number(fields.get("step")),
        _number(fields.get("epoch")),
        fields["rank"],
        values,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    try:
        number = float(value) if _is_number(value) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_series(path: Path) -> dict[tuple[str, int], Series]:
    """Every metric of every rank in the file, by (name, rank)."""
    series: dict[tuple[str, int], Series] = {}
    for line in MetricsReader(path).read():
        for name, value in line.values.items():
            one = series.setdefault((name, line.rank), Series())
            one.time_s.append(line.time_s)
            one.step.append(line.step)
            one.epoch.append(line.epoch)
            one.value.append(math.nan if value is None else value)
    return series
