"""How much of each run goes into a page: the files of a run directory may have any size and content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

MOST_RUNS = 100  # on one page
_POINTS = 300_000  # of all curves: 32 bytes each in the page
_IMAGE_BYTES = 4 << 20  # of all runs, as they are in the page
_TEXT_BYTES = 2 << 20  # of one kind (last lines, tables, configurations) of all runs


@dataclass(frozen=True, slots=True)
class Limits:
    """The share of one run. curve_points: of all its curves together. The bytes are those before escaping.

    A page has less than 20 MB with any number of runs up to MOST_RUNS.
    """

    curve_points: int
    image_bytes: int
    log_bytes: int
    table_bytes: int
    config_bytes: int
    diff_bytes: int

    @classmethod
    def for_runs(cls, count: int) -> Self:
        """Return the share of each of `count` runs."""
        share = max(1, count)
        text = _TEXT_BYTES // share
        return cls(
            _POINTS // share,
            _IMAGE_BYTES // share,
            min(text, 256 << 10),
            text,
            min(text, 128 << 10),
            min(text, 200_000),
        )
