"""What ranks pass to trackers. Times are nanoseconds of the host's wall clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Numbers:
    """The values of one ctx.log call."""

    time_ns: int
    values: Mapping[str, float]
    step: int | None = None
    epoch: float | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a PNG file at `path`, which exists until the tracker's log() returns."""

    time_ns: int
    name: str
    path: Path
    caption: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers, text, None and images; each row is as long as `columns`."""

    time_ns: int
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float | str | bool | Image | None, ...], ...]
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint in `folder`, which exists until log() returns. For trackers with `checkpoints: true`."""

    time_ns: int
    step: int
    folder: Path
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is trained, as given to ctx.prepare; only for trackers with the option `watch`."""

    time_ns: int
    model: Any  # torch.nn.Module; the package `tracking` does not import torch


Item = Numbers | Image | Table | Checkpoint | Model
