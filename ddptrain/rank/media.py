"""ctx.log_image and ctx.log_table: images and tables as files and as items for the trackers."""

from __future__ import annotations

import csv
import io
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ddptrain.rank.output import ArtifactFiles, stays_below
from ddptrain.tracking import protocol as items

if TYPE_CHECKING:
    from ddptrain.rank.trackers import RankTrackers


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
        _, kept = self._save_image(name, image, step, for_trackers=self._tracked.wants(items.Image))
        if kept is not None:
            self._tracked.put(items.Image(time.time_ns(), name, kept, caption, step), kept)

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], step: int | None) -> None:
        """Save a table for ctx.log_table."""
        _check_name(name)
        names = tuple(str(column) for column in columns)
        for_trackers = self._tracked.wants(items.Table)
        tracked: list[tuple[Any, ...]] = []
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        for number, row in enumerate(rows):
            if len(row) != len(names):
                raise ValueError(f"table {name!r} has {len(names)} columns, row {number} has {len(row)} values")
            cells = [self._cell(name, step, *cell, for_trackers=for_trackers) for cell in zip(names, row, strict=True)]
            writer.writerow([in_file for in_file, _ in cells])
            tracked.append(tuple(for_tracker for _, for_tracker in cells))
        path = f"tables/{name}/{_prefix(step)}rank-{self._rank}.csv"
        self._files.save(path, text.getvalue().encode("utf-8", "backslashreplace"))
        if for_trackers:
            kept = [cell.path for row in tracked for cell in row if isinstance(cell, items.Image)]
            self._tracked.put(items.Table(time.time_ns(), name, names, tuple(tracked), step), *kept)

    def _cell(self, name: str, step: int | None, column: str, value: Any, *, for_trackers: bool) -> tuple[Any, Any]:
        """Return the value for the file, and the value for trackers."""
        if isinstance(value, Image.Image) or getattr(value, "ndim", 0) >= 2:
            path, kept = self._save_image(name, value, step, for_trackers=for_trackers)
            return path, items.Image(time.time_ns(), name, kept, "", step) if kept is not None else None
        item = value.item() if hasattr(value, "item") else value
        if item is not None and not isinstance(item, int | float | str | bool):
            raise TypeError(
                f"tables take numbers, text, None and images: {column!r} is {value!r} ({type(value).__name__})"
            )
        return item, item

    def _save_image(self, name: str, image: Any, step: int | None, *, for_trackers: bool) -> tuple[str, Path | None]:
        """Save an image. Return its path below artifacts/, and its file for trackers (None without `for_trackers`)."""
        number = self._saved[name, step]
        path = f"images/{name}/{_prefix(step)}rank-{self._rank}{f'-{number}' if number else ''}.png"
        staged = self._files.stage(path, png(image))
        self._saved[name, step] += 1
        kept = self._tracked.keep(staged, ".png") if for_trackers else None  # trackers read the format from the suffix
        self._files.announce(path, staged)
        return path, kept


def png(image: Any) -> bytes:
    """Encode an image as PNG.

    `image` is a tensor [3, H, W], [1, H, W] or [H, W], an array [H, W, 3], [H, W, 1] or [H, W], or a PIL image. Tensors
    and arrays are uint8, bool, or floats from 0 to 1 (values outside are clipped, NaN becomes 0).

    Raises:
        TypeError: `image` is none of these.
        ValueError: it has another shape.
    """
    picture = image if isinstance(image, Image.Image) else _to_pil(image)
    if picture.mode not in ("L", "RGB", "RGBA"):
        picture = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)  # the fastest level, because the training step waits
    return file.getvalue()


def _to_pil(image: Any) -> Image.Image:
    is_tensor = hasattr(image, "detach")
    if not is_tensor and not isinstance(image, np.ndarray):
        raise TypeError(f"an image is a tensor, a numpy array or a PIL image, not {type(image).__name__}")
    if is_tensor:
        values = image.detach().cpu()
        array: Any = (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
        array = np.moveaxis(array, 0, -1) if array.ndim == 3 else array
    else:
        array = image
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        wanted = "[3, H, W], [1, H, W] or [H, W]" if is_tensor else "[H, W, 3], [H, W, 1] or [H, W]"
        what = "a tensor" if is_tensor else "an array"
        raise ValueError(f"{what} that is an image has the shape {wanted}, not {list(image.shape)}")
    if array.dtype != np.uint8:
        if array.dtype != np.bool_ and not np.issubdtype(array.dtype, np.floating):
            raise TypeError(f"an image is of uint8, or of floats from 0 to 1, not of {array.dtype}")
        array = np.rint(np.clip(np.nan_to_num(array, nan=0.0), 0.0, 1.0) * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))


def _prefix(step: int | None) -> str:
    return f"step-{step}-" if step is not None else ""


def _check_name(name: str) -> None:
    if not stays_below(name) or name.endswith("/"):
        raise ValueError(f"ctx.log_image and ctx.log_table take a name such as 'examples' or 'val/worst', not {name!r}")
