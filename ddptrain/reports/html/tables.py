"""The tables that a run has saved: first rows, a gallery if cells name images, a confusion matrix."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddptrain.file_ops import open_regular
from ddptrain.reports.html.pictures import Picture, PictureReader, is_picture, step_of_file

_LARGEST_FILE_BYTES = 32 << 20  # the beginning of a larger file is read
_LONGEST_LINE = 64 << 10  # characters; a longer line is shortened
_MOST_TABLES = 20
_MOST_ROWS = 100
_MOST_COLUMNS = 20
_CELL_CHARACTERS = 200
_MOST_PREDICTIONS = 500_000
_MOST_CLASSES = 24
_MOST_IN_GALLERY = 60
_WORST = 10
_SHADES = 9
_OTHER = "other classes"
_NAMES = re.compile(r"tables/generated_names/step-\d{1,18}-rank-\d{1,9}\.csv")
_NAMES_COLUMNS = ["name", "is_known"]


@dataclass(frozen=True, slots=True)
class TableFile:
    """The first rows of a CSV file. `more`: whether there are further rows."""

    path: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: bool


@dataclass(frozen=True, slots=True)
class GeneratedName:
    """A name that a model of petnames has written at the end of its training; known ones are in its data."""

    name: str
    is_known: bool


@dataclass(frozen=True, slots=True)
class GalleryItem:
    """An image of a table with the other cells of its row. is_wrong: its label and its prediction differ."""

    picture: Picture
    cells: Sequence[tuple[str, str]]
    is_wrong: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """Images of one class that were predicted as another one; `shade` is 0 to 9, for the colour."""

    count: int
    shade: int


@dataclass(frozen=True, slots=True)
class Confusion:
    """Which class was predicted for the images of which class. rows: class, its recall from 0 to 1, its cells.

    worst: the wrong predictions with the highest probability: key, class, predicted class, probability.
    """

    classes: Sequence[str]
    rows: Sequence[tuple[str, float, Sequence[Cell]]]
    total: int
    right: int
    worst: Sequence[tuple[str, str, str, float]]

    @property
    def accuracy(self) -> float:
        """The share of right predictions."""
        return self.right / self.total


class CsvFiles:
    """The CSV files of a run's artifacts."""

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self._folder = folder
        self._paths = [path for path in files if path.lower().endswith(".csv")]

    def tables(self) -> list[TableFile]:
        """Return the newest table of each name and rank."""
        newest: dict[str, str] = {}
        others = (path for path in self._paths if not _NAMES.fullmatch(path))
        for path in sorted(others, key=step_of_file):
            folder, _, name = path.rpartition("/")
            newest[f"{folder}/{re.sub(r'step-[0-9]+-', '', name)}"] = path
        found = [self._table(path) for path in sorted(newest.values())[:_MOST_TABLES]]
        return [table for table in found if table is not None]

    def _table(self, path: str) -> TableFile | None:
        lines = self.rows(path)
        columns = _cells(next(lines, []))
        rows = [_cells(row) for row in islice(lines, _MOST_ROWS)]
        return TableFile(path, columns, rows, more=next(lines, None) is not None) if columns else None

    def rows(self, path: str) -> Iterator[list[str]]:
        """Yield the rows of a file, the header first; none if it cannot be read."""
        try:
            with os.fdopen(open_regular(self._folder / path), "rb") as file:
                text = file.read(_LARGEST_FILE_BYTES).decode("utf-8", "replace")
        except OSError:
            return
        lines = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}\n" for line in io.StringIO(text))
        try:
            yield from csv.reader(lines)
        except csv.Error:  # a field that is too long
            return

    def generated_names(self) -> list[GeneratedName]:
        """Return the names that a run of petnames has generated last."""
        paths = sorted(filter(_NAMES.fullmatch, self._paths), key=step_of_file)
        table = self._table(paths[-1]) if paths else None
        if table is None or table.columns != _NAMES_COLUMNS:
            return []
        return [GeneratedName(row[0], row[1] == "True") for row in table.rows if len(row) == len(_NAMES_COLUMNS)]

    def predictions(self) -> list[list[str]]:
        """Return key, label, prediction and probability of the rows in predictions/ of all ranks."""
        found: list[list[str]] = []
        for path in sorted(path for path in self._paths if path.startswith("predictions/")):
            lines = self.rows(path)
            header = next(lines, [])
            if not {"label", "prediction"} <= set(header):
                continue
            at = [header.index(name) if name in header else None for name in _PREDICTION]
            rows = (row for row in islice(lines, _MOST_PREDICTIONS - len(found)) if len(row) == len(header))
            found += [["" if index is None else row[index] for index in at] for row in rows]
        return found


_PREDICTION = ("key", "label", "prediction", "probability")


def _cells(row: Sequence[str]) -> list[str]:
    return [cell if len(cell) <= _CELL_CHARACTERS else f"{cell[:_CELL_CHARACTERS]}..." for cell in row[:_MOST_COLUMNS]]


def gallery(table: TableFile, pictures: PictureReader) -> list[GalleryItem]:
    """Return the images that a table's cells name, wrong predictions first; none if it names no images."""
    column = next((at for at in range(len(table.columns)) if _names_images(table, at)), None)
    if column is None:
        return []
    items = []
    for row in sorted(table.rows, key=lambda row: not _is_wrong(table.columns, row))[:_MOST_IN_GALLERY]:
        picture = pictures.read(row[column]) if len(row) == len(table.columns) else None
        if picture is not None:
            cells = [
                (name, cell) for at, (name, cell) in enumerate(zip(table.columns, row, strict=True)) if at != column
            ]
            items.append(GalleryItem(picture, cells, _is_wrong(table.columns, row)))
    return items


def _names_images(table: TableFile, column: int) -> bool:
    cells = [row[column] for row in table.rows if column < len(row)]
    return bool(cells) and all(is_picture(cell) and cell.startswith("images/") for cell in cells)


def _is_wrong(columns: Sequence[str], row: Sequence[str]) -> bool:
    cells = dict(zip(columns, row, strict=False))
    return "label" in cells and "prediction" in cells and cells["label"] != cells["prediction"]


def confusion(predictions: Sequence[Sequence[str]]) -> Confusion | None:
    """Count classes against predicted classes; the most frequent 24 have rows of their own. None without any."""
    if not predictions:
        return None
    found = Counter(name[:_CELL_CHARACTERS] for _, label, answer, _ in predictions for name in (label, answer))
    classes = sorted(name for name, _ in found.most_common(_MOST_CLASSES))
    known = set(classes)
    counts = Counter((_known(label, known), _known(answer, known)) for _, label, answer, _ in predictions)
    if len(found) > len(classes):
        classes.append(_OTHER)
    return Confusion(
        classes,
        [_row(name, classes, counts) for name in classes],
        len(predictions),
        sum(label == answer for _, label, answer, _ in predictions),
        _worst(predictions),
    )


def _known(name: str, known: set[str]) -> str:
    short = name[:_CELL_CHARACTERS]
    return short if short in known else _OTHER


def _row(name: str, classes: Sequence[str], counts: Mapping[tuple[str, str], int]) -> tuple[str, float, Sequence[Cell]]:
    row = [counts.get((name, answer), 0) for answer in classes]
    total = sum(row)
    cells = [Cell(count, -(-_SHADES * count // total) if total else 0) for count in row]
    return name, counts.get((name, name), 0) / total if total else 0.0, cells


def _worst(predictions: Sequence[Sequence[str]]) -> list[tuple[str, str, str, float]]:
    wrong = [
        (key[:_CELL_CHARACTERS], label[:_CELL_CHARACTERS], answer[:_CELL_CHARACTERS], _float(probability))
        for key, label, answer, probability in predictions
        if label != answer
    ]
    return sorted(wrong, key=lambda row: -row[3])[:_WORST]


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= 1.0 else 0.0
