"""What ctx.log_image and ctx.log_table do: a file each in the run directory, and the same to trackers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.rank.files import Files, stays_below
from ddptrain.rank.media import tables
from ddptrain.rank.media.images import is_image, png
from ddptrain.tracking.items import Image, Table

if TYPE_CHECKING:
    from ddptrain.rank.trackers import Tracked

_Cell = float | str | bool | None


def _check(name: str) -> None:
    if not stays_below(name) or name.endswith("/"):
        raise ValueError(f"ctx.log_image and ctx.log_table take a name such as 'examples' or 'val/worst', not {name!r}")


class Showing:
    """Pictures and tables of one rank."""

    def __init__(self, rank: int, files: Files, tracked: Tracked) -> None:
        self._rank = rank
        self._files = files
        self._tracked = tracked
        self._shown: Counter[tuple[str, int | None]] = Counter()

    def image(self, name: str, image: Any, step: int | None, caption: str) -> None:
        """Save a picture as artifacts/images/`name`/step-<n>-rank-<r>[-<k>].png, the `k`-th of that step after the
        first.

        Raises: TypeError, ValueError where it is no picture, or the name no path; OSError where it can't be written.
        """
        _check(name)
        _, lent = self._save_picture(name, image, step, for_trackers=self._tracked.wants(Image))
        if lent is not None:
            shown = Image(time.time_ns(), name, lent, caption, step)
            self._tracked.put_lent(shown, lent)

    def table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], step: int | None, form: str
    ) -> None:
        """Save a table as artifacts/tables/`name`/[step-<n>-]rank-<r>.csv; its pictures as those of image().

        Raises: as image(), and ValueError for a row that is not as long as `columns`, or another format than csv and
        parquet; ImportError where pyarrow is missing.
        """
        _check(name)
        if form not in tables.FORMATS:
            raise ValueError(f"a table is written as csv or parquet, not as {form!r}")
        heads = tuple(str(column) for column in columns)
        wanted = self._tracked.wants(Table)
        told: list[tuple[Any, ...]] = []
        written: list[list[_Cell]] = []
        for row in rows:
            if len(row) != len(heads):
                raise ValueError(f"table {name!r} has {len(heads)} columns, row {len(written)} has {len(row)} values")
            cells = [self._cell(name, step, column, value, wanted) for column, value in zip(heads, row, strict=True)]
            written.append([on_disk for on_disk, _ in cells])
            if wanted:
                told.append(tuple(shown for _, shown in cells))
        at = f"step-{step}-" if step is not None else ""
        self._files.save(f"tables/{name}/{at}rank-{self._rank}.{form}", tables.encode(heads, written, form))
        if wanted:
            lent = [cell.path for row in told for cell in row if isinstance(cell, Image)]
            self._tracked.put_lent(Table(time.time_ns(), name, heads, tuple(told), step), *lent)

    def _cell(self, name: str, step: int | None, column: str, value: Any, wanted: bool) -> tuple[_Cell, Any]:
        """A value as it stands in the file, and as trackers get it."""
        if type(value) in (int, float, str, bool) or value is None:
            return value, value
        if is_image(value):
            path, lent = self._save_picture(name, value, step, for_trackers=wanted)
            return path, Image(time.time_ns(), name, lent, "", step) if lent is not None else None
        item = value.item() if hasattr(value, "item") else value
        if not isinstance(item, int | float | str | bool):
            raise TypeError(
                f"tables take numbers, text, None and images: {column!r} is {value!r} ({type(value).__name__})"
            )
        return item, item

    def _save_picture(self, name: str, image: Any, step: int | None, *, for_trackers: bool) -> tuple[str, Path | None]:
        """Where the picture is below artifacts/, and a file of it for trackers, where they want one."""
        data = png(image)
        again = self._shown[name, step]
        self._shown[name, step] += 1
        at = f"step-{step}-" if step is not None else ""
        path = f"images/{name}/{at}rank-{self._rank}{f'-{again}' if again else ''}.png"
        lent: list[Path] = []

        def lend(staged: Path) -> None:
            with suppress(OSError):  # trackers may lack it, the run directory does not
                lent.append(self._tracked.lend(staged, ".png"))  # by which trackers know what it is

        self._files.save(path, data, lend if for_trackers else None)
        return path, lent[0] if lent else None
