"""What a run has saved, for the page: tables, pictures, and galleries of predictions, mistakes first.

A picture is not copied: it is decoded and encoded again, so that a page contains only what this program has written.
Files that are too large, damaged, or of another format are left out.
"""

from __future__ import annotations

import base64
import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

from ddptrain.file_ops import open_regular
from ddptrain.results.layout import files_below
from ddptrain.results.run import Run

_MOST_FILES, _MOST_TABLES, _MOST_ROWS, _MOST_COLUMNS = 5000, 20, 100, 20
_LARGEST_FILE_BYTES = 32 << 20  # the beginning of a larger table is read; a larger picture is left out
_LONGEST_LINE, _CELL_CHARACTERS = 64 << 10, 200  # of a table
_PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_MOST_PIXELS = 32_000_000
_LONGEST_SIDE, _SMALL = 480, 64  # pixels of a picture in the page; of one that is enlarged without smoothing
_MOST_IN_GALLERY, _MOST_GROUPS, _MOST_OF_GROUP = 60, 12, 24
_MOST_PREDICTIONS = 500_000
_STEP = re.compile(r"step-(\d{1,18})-")
_EVALUATED = re.compile(r"(val|valid|validation|eval|test|mistakes)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a run: `source` is a data URL; `name` its file."""

    name: str
    source: str
    width: int
    height: int

    @property
    def is_small(self) -> bool:
        """Whether it is to be enlarged."""
        return max(self.width, self.height) <= _SMALL


@dataclass(frozen=True, slots=True)
class Table:
    """The first rows of a CSV file. `more`: whether there are further rows."""

    path: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: bool


@dataclass(frozen=True, slots=True)
class GalleryItem:
    """An image of a table with the other cells of its row. is_wrong: its label and its prediction differ."""

    picture: Picture
    cells: Sequence[tuple[str, str]]
    is_wrong: bool


@dataclass(frozen=True, slots=True)
class Artifacts:
    """galleries: tables with images, by path, those of held-out data first; in each, wrong predictions are first.

    pictures: other images, by folder. files: the other files with their sizes in bytes.
    """

    tables: Sequence[Table] = ()
    galleries: Sequence[tuple[str, Sequence[GalleryItem]]] = ()
    pictures: Sequence[tuple[str, Sequence[Picture]]] = ()
    files: Sequence[tuple[str, int]] = ()


def read_artifacts(view: Run, most_pictures: int) -> Artifacts:
    """Return what the run has saved."""
    root = view.artifacts_dir
    below = ((path.relative_to(root).as_posix(), size) for path, size in islice(files_below(root), _MOST_FILES))
    files = dict(sorted(below))
    reader = _Reader(root, files, most_pictures)
    paths = sorted(_newest_tables(files), key=lambda path: not _EVALUATED.search(path))
    tables = list(filter(None, map(reader.table, paths)))
    galleries = [(table.path, items) for table in tables if (items := reader.gallery(table))]
    shown = {path for path, _ in galleries}
    in_tables = {cell for table in tables for row in table.rows for cell in row}
    return Artifacts(
        [table for table in tables if table.path not in shown],
        galleries,
        reader.groups([path for path in files if _is_picture(path) and path not in in_tables]),
        [(path, size) for path, size in files.items() if not path.endswith(".png")],
    )


def _newest_tables(files: Mapping[str, int]) -> list[str]:
    """Return the newest table of each name and rank."""
    newest: dict[str, str] = {}
    for path in sorted((path for path in files if path.lower().endswith(".csv")), key=_step):
        folder, _, name = path.rpartition("/")
        newest[f"{folder}/{re.sub(r'step-[0-9]+-', '', name)}"] = path
    return sorted(newest.values())[:_MOST_TABLES]


def _step(path: str) -> int:
    """Return the step in a name such as step-20-rank-0.png; -1 without one."""
    match = _STEP.search(PurePosixPath(path).name)
    return int(match[1]) if match else -1


def _is_picture(path: str) -> bool:
    return path.lower().endswith(_PICTURES)


class _Reader:
    """Reads the files of a folder; no other file, and a limited number of pictures."""

    def __init__(self, folder: Path, files: Mapping[str, int], most_pictures: int) -> None:
        self._folder, self._files, self._left = folder, files, most_pictures

    def rows(self, path: str) -> Iterator[list[str]]:
        """Yield the rows of a table, the header first; none if it cannot be read."""
        try:
            with os.fdopen(open_regular(self._folder / path), "rb") as file:
                text = file.read(_LARGEST_FILE_BYTES).decode("utf-8", "replace")
            lines = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}\n" for line in io.StringIO(text))
            yield from csv.reader(lines)
        except (OSError, csv.Error):  # a field that is too long
            return

    def table(self, path: str) -> Table | None:
        """Return the first rows of a table, of a table of predictions the wrong ones; None if it is empty."""
        rows = self.rows(path)
        columns = [_short(cell) for cell in next(rows, [])[:_MOST_COLUMNS]]
        if {"label", "prediction"} <= set(columns):
            rows = iter(sorted(islice(rows, _MOST_PREDICTIONS), key=lambda row: not _is_wrong(columns, row)))
        shown = [[_short(cell) for cell in row[:_MOST_COLUMNS]] for row in islice(rows, _MOST_ROWS)]
        return Table(path, columns, shown, next(rows, None) is not None) if columns else None

    def picture(self, path: str) -> Picture | None:
        """Return the picture of a file; None if it cannot be shown, or there are too many."""
        if not _is_picture(path) or not 0 < self._files.get(path, 0) <= _LARGEST_FILE_BYTES or self._left <= 0:
            return None
        try:
            state = (self._folder / path).lstat()
        except OSError:
            return None
        found = _picture(self._folder / path, state.st_size, state.st_mtime_ns)
        self._left -= found is not None
        return found

    def gallery(self, table: Table) -> list[GalleryItem]:
        """Return the images that a table's cells name, wrong predictions first; none if it names no images."""
        columns = list(zip(*(row for row in table.rows if len(row) == len(table.columns)), strict=True))
        of_images = (all(_is_picture(cell) and cell.startswith("images/") for cell in column) for column in columns)
        if (at := next((at for at, is_images in enumerate(of_images) if is_images), None)) is None:
            return []
        items: list[GalleryItem] = []
        for row in (row for row in table.rows if len(row) == len(table.columns)):
            if len(items) < _MOST_IN_GALLERY and (picture := self.picture(row[at])) is not None:
                cells = [pair for pair in zip(table.columns, row, strict=True) if pair[1] != row[at]]
                items.append(GalleryItem(picture, cells, _is_wrong(table.columns, row)))
        return items

    def groups(self, paths: Sequence[str]) -> list[tuple[str, list[Picture]]]:
        """Return pictures by folder, those of the newest steps first."""
        below: dict[str, list[str]] = {}
        for path in sorted(paths, key=lambda path: (-_step(path), path)):
            below.setdefault(path.rpartition("/")[0], []).append(path)
        found = (
            (folder, list(filter(None, map(self.picture, below[folder][:_MOST_OF_GROUP])))) for folder in sorted(below)
        )
        return [(folder.removeprefix("images/"), shown) for folder, shown in islice(found, _MOST_GROUPS) if shown]


@lru_cache(maxsize=256)  # a page of a run that is running is made again and again
def _picture(path: Path, size_bytes: int, changed_ns: int) -> Picture | None:
    from PIL import Image

    try:
        with (
            os.fdopen(open_regular(path), "rb") as file,
            Image.open(file, formats=("PNG", "JPEG", "WEBP")) as image,
        ):
            if image.width * image.height > _MOST_PIXELS:
                return None
            image.draft("RGB", (_LONGEST_SIDE, _LONGEST_SIDE))  # a large JPEG is decoded smaller
            shown = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except Exception:  # a damaged image raises errors of many types
        return None
    shown.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    kind = "JPEG" if max(shown.size) > 2 * _SMALL and shown.mode == "RGB" else "PNG"
    target = io.BytesIO()
    shown.save(target, kind, quality=85)
    data = base64.b64encode(target.getvalue()).decode()
    return Picture(path.name, f"data:image/{kind.lower()};base64,{data}", *shown.size)


def _short(cell: str) -> str:
    return cell if len(cell) <= _CELL_CHARACTERS else f"{cell[:_CELL_CHARACTERS]}..."


def _is_wrong(columns: Sequence[str], row: Sequence[str]) -> bool:
    cells = dict(zip(columns, row, strict=False))
    return "label" in cells and "prediction" in cells and cells["label"] != cells["prediction"]
