"""What ranks hand to trackers. Times are nanoseconds of the host's wall clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one call of ctx.log was given."""

    time_ns: int
    values: Mapping[str, float]
    step: int | None = None
    epoch: float | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """A picture, as a PNG file at `path`, which is there until the tracker's log() returns."""

    time_ns: int
    name: str
    path: Path
    caption: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers, text, None and images, each as long as `columns`."""

    time_ns: int
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float | str | bool | Image | None, ...], ...]
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint in `folder`, which is there until log() returns; for trackers with `checkpoints: true`."""

    time_ns: int
    step: int
    folder: Path
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Model:
    """The model that ctx.prepare was given, as it trains; for trackers with `watch` among their options."""

    time_ns: int
    model: Any  # torch.nn.Module, which this room does not import


Item = Numbers | Image | Table | Checkpoint | Model
