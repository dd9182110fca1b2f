"""Implements ctx.log_image and ctx.log_table: writes a file into the run directory, and passes the item to trackers."""

from __future__ import annotations

import csv
import io
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.rank.artifact_files import ArtifactFiles, stays_below
from ddptrain.rank.media.images import is_image, png
from ddptrain.tracking.items import Image, Table

if TYPE_CHECKING:
    from ddptrain.rank.trackers import RankTrackers

_Cell = float | str | bool | None


class MediaLog:
    """The images and tables of one rank."""

    def __init__(self, rank: int, files: ArtifactFiles, tracked: RankTrackers) -> None:
        self._rank = rank
        self._files = files
        self._tracked = tracked
        self._saved: Counter[tuple[str, int | None]] = Counter()  # images by name and step

    def image(self, name: str, image: Any, step: int | None, caption: str) -> None:
        """Save an image for ctx.log_image."""
        _check_name(name)
        _, kept = self._save_image(name, image, step, for_trackers=self._tracked.wants(Image))
        if kept is not None:
            self._tracked.put_with_files(Image(time.time_ns(), name, kept, caption, step), kept)

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], step: int | None) -> None:
        """Save a table for ctx.log_table."""
        _check_name(name)
        names = tuple(str(column) for column in columns)
        for_trackers = self._tracked.wants(Table)
        tracked_rows: list[tuple[Any, ...]] = []
        written: list[list[_Cell]] = []
        for row in rows:
            if len(row) != len(names):
                raise ValueError(f"table {name!r} has {len(names)} columns, row {len(written)} has {len(row)} values")
            cells = [
                self._cell(name, step, column, value, for_trackers) for column, value in zip(names, row, strict=True)
            ]
            written.append([in_file for in_file, _ in cells])
            if for_trackers:
                tracked_rows.append(tuple(tracked for _, tracked in cells))
        prefix = f"step-{step}-" if step is not None else ""
        self._files.save(f"tables/{name}/{prefix}rank-{self._rank}.csv", _csv(names, written))
        if for_trackers:
            kept = [cell.path for row in tracked_rows for cell in row if isinstance(cell, Image)]
            self._tracked.put_with_files(Table(time.time_ns(), name, names, tuple(tracked_rows), step), *kept)

    def _cell(self, name: str, step: int | None, column: str, value: Any, for_trackers: bool) -> tuple[_Cell, Any]:
        """Return the value for the file, and the value for trackers."""
        if type(value) in (int, float, str, bool) or value is None:
            return value, value
        if is_image(value):
            path, kept = self._save_image(name, value, step, for_trackers=for_trackers)
            return path, Image(time.time_ns(), name, kept, "", step) if kept is not None else None
        item = value.item() if hasattr(value, "item") else value
        if not isinstance(item, int | float | str | bool):
            raise TypeError(
                f"tables take numbers, text, None and images: {column!r} is {value!r} ({type(value).__name__})"
            )
        return item, item

    def _save_image(self, name: str, image: Any, step: int | None, *, for_trackers: bool) -> tuple[str, Path | None]:
        """Save an image. Return its path below artifacts/, and its file for trackers (None without `for_trackers`)."""
        data = png(image)
        number = self._saved[name, step]
        self._saved[name, step] += 1
        prefix = f"step-{step}-" if step is not None else ""
        path = f"images/{name}/{prefix}rank-{self._rank}{f'-{number}' if number else ''}.png"
        kept: list[Path] = []

        def keep(staged: Path) -> None:
            with suppress(OSError):  # trackers then lack the image, but the run directory has it
                kept.append(self._tracked.keep(staged, ".png"))  # trackers recognize the format by the suffix

        self._files.save(path, data, keep if for_trackers else None)
        return path, kept[0] if kept else None


def _check_name(name: str) -> None:
    if not stays_below(name) or name.endswith("/"):
        raise ValueError(f"ctx.log_image and ctx.log_table take a name such as 'examples' or 'val/worst', not {name!r}")


def _csv(columns: Sequence[str], rows: Sequence[Sequence[_Cell]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")
